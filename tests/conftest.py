"""Settings of every suite."""

from __future__ import annotations

from hypothesis import settings

# no test here is about time: what an example takes depends on the machine
settings.register_profile("kvpull", deadline=None)
settings.load_profile("kvpull")
