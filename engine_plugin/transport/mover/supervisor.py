"""Keeps one mover running and replaces it: after its death, or to end a quarantine.

A replacement starts before the old mover ends, so that healthy pulls go on; the old one gets a moment to
finish them and is then killed, whatever it holds. Deaths in quick succession are answered with back-off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.link import Mover, MoverDown
from engine_plugin.transport.tier_memory import TierMemory

BACKOFF_S: Final = 0.05  # after the first death; doubles
BACKOFF_MAX_S: Final = 5.0
_ASKS: Final = 4  # within `mover_silence_s`
HEALTHY_S: Final = 30.0  # a mover that lived this long clears the back-off

log = logging.getLogger(__name__)


class MoverSupervisor:
    """The current mover of a transport, if one is up.

    `on_change` is called with every new mover once it is ready.
    """

    def __init__(
        self, name: str, tier: TierMemory, limits: Limits, on_change: Callable[[Mover], None]
    ) -> None:
        self._name = name
        self._tier = tier
        self._limits = limits
        self._on_change = on_change
        self._epoch = 0
        self._current: Mover | None = None
        self._up = asyncio.Event()
        self._retire = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def current(self) -> Mover | None:
        """The mover to use now; None while there is none."""
        return self._current

    async def start(self) -> None:
        """Start the first mover. Raises MoverDown."""
        self._become(await self._spawn())
        self._task = asyncio.create_task(self._supervise(), name="mover-supervisor")

    async def stop(self) -> None:
        """End every mover; returns when all are dead."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._current is not None:
            self._end_later(self._current.end(drain_s=self._limits.drain_s))
        self._current = None
        if self._ending:
            await asyncio.wait(self._ending)

    async def acquire(self) -> Mover:
        """The current mover, waiting for one to come up; the caller bounds the wait."""
        while self._current is None:
            await self._up.wait()
        return self._current

    def retire(self, mover: Mover) -> None:
        """Replace `mover` (because writes into its memory cannot be fenced otherwise)."""
        if mover is self._current:
            self._retire.set()

    async def _spawn(self) -> Mover:
        self._epoch += 1
        return await Mover.spawn(self._name, self._epoch, self._tier, deadline_s=self._limits.mover_start_s)

    def _become(self, mover: Mover) -> None:
        self._current = mover
        self._up.set()
        self._on_change(mover)

    async def _supervise(self) -> None:
        delay_s = BACKOFF_S
        loop = asyncio.get_running_loop()
        while True:
            mover = self._current
            if mover is not None:
                started_s = loop.time()
                await self._until_needed(mover)
                if loop.time() - started_s > HEALTHY_S:
                    delay_s = BACKOFF_S
                if mover.gone.done():
                    log.warning("mover %s ended with status %s", mover.agent, mover.gone.result())
                    self._down(mover)
            if self._current is None:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, BACKOFF_MAX_S)
            await self._replace()

    async def _until_needed(self, mover: Mover) -> None:
        """Until it is dead or to be replaced. One that hangs (its loop no longer turns) is killed: it left
        `_ASKS` questions unanswered. Questions and not time, for a loop of ours that was held up for long
        has not asked, nor read what came."""
        retire = asyncio.create_task(self._retire.wait())
        needs: set[asyncio.Future[Any]] = {mover.gone, retire}
        loop, ask_s, unanswered = asyncio.get_running_loop(), self._limits.mover_silence_s / _ASKS, 0
        try:
            while not any(need.done() for need in needs):
                mover.ask_alive()
                asked_s = loop.time()
                await asyncio.wait(needs, timeout=ask_s, return_when=asyncio.FIRST_COMPLETED)
                unanswered = 0 if mover.heard_at_s >= asked_s else unanswered + 1
                if not mover.gone.done() and unanswered >= _ASKS:
                    log.warning("mover %s gives no sign of life and is killed", mover.agent)
                    mover.kill()
        finally:
            retire.cancel()

    async def _replace(self) -> None:
        old = self._current
        try:
            new = await self._spawn()
        except MoverDown as exc:
            log.error("no new mover: %s", exc)
            new = None
        self._retire.clear()
        if old is not None:
            self._down(old)
            self._end_later(self._replace_later(old))
        if new is not None:
            self._become(new)

    def _down(self, mover: Mover) -> None:
        if mover is self._current:
            self._current = None
            self._up.clear()

    def _end_later(self, ending: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(ending, name="mover-end")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _replace_later(self, mover: Mover) -> None:
        await mover.finish_work(self._limits.drain_s)
        await mover.end(drain_s=0.0)
