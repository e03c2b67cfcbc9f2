"""Bounded waiting for a condition that a debug surface shows: the only polling in `deploy.local`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from deploy.local.errors import FleetError

_POLL_S = 0.01
Seen = TypeVar("Seen")


class ConditionNotMet(FleetError):
    """A condition did not come true in time; the message names it and what was seen last."""


async def until(
    what: str,
    look: Callable[[], Awaitable[Seen]],
    holds: Callable[[Seen], bool],
    *,
    timeout_s: float = 15.0,
) -> Seen:
    """Look repeatedly until `holds`; returns what was seen then.

    Raises:
        ConditionNotMet: not within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        seen = await look()
        if holds(seen):
            return seen
        if time.monotonic() >= deadline_s:
            raise ConditionNotMet(f"Not within {timeout_s:g} s: {what}; seen last: {seen}")
        await asyncio.sleep(_POLL_S)
