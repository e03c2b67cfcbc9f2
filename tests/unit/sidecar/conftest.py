"""No property here is about time: hypothesis's deadline would only measure how busy the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
