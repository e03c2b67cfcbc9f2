"""Emulated engines for tests of the picker's process."""

from __future__ import annotations

from tests.integration.engine.conftest import loopback_nixl, start_engine

__all__ = ["loopback_nixl", "start_engine"]
