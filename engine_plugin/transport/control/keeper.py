"""Sessions kept open ahead of need, so that no request pays for the first contact of a pair.

Each peer given has one task that dials, waits for the session's end, and dials again, with the dialer's own
back-off between failures. A peer that cannot be reached costs a dial now and then and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from engine_plugin.identity import Address, format_address
from engine_plugin.transport.control.dialer import Dialer
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.types import PullError

log = logging.getLogger(__name__)


class Keeper:
    """The peers to stay connected to; `keep` replaces them."""

    def __init__(self, dialer: Dialer, limits: Limits) -> None:
        self._dialer = dialer
        self._limits = limits
        self._tasks: dict[Address, asyncio.Task[None]] = {}

    def keep(self, peers: Iterable[Address]) -> None:
        """Stay connected to these, at most `limits.kept_peers` of them, and to no other; open sessions to
        others stay as they are."""
        wanted = list(dict.fromkeys(peers))[: self._limits.kept_peers]
        for gone in self._tasks.keys() - set(wanted):
            self._tasks.pop(gone).cancel()
        for peer in wanted:
            if peer not in self._tasks:
                name = f"p2p-keep-{format_address(peer)}"
                self._tasks[peer] = asyncio.create_task(self._stay(peer), name=name)

    async def stop(self) -> None:
        """No more dialling."""
        tasks, self._tasks = set(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _stay(self, peer: Address) -> None:
        delay_s = self._limits.redial_s
        while True:
            try:
                session = await self._dialer.session(peer)
                delay_s = self._limits.redial_s
                await asyncio.shield(session.closed)
            except PullError as error:
                log.info("%s cannot be connected to ahead of need: %s", format_address(peer), error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._limits.keep_redial_max_s)
