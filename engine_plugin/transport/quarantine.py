"""Destination slots (and windows) of moves that were given up but may still be written to.

Nothing fences a NIXL write once it is posted: removing the peer or releasing the handle returns at once
and bytes land later. So such slots come back only when the source says that every write it posted has
completed (`settled`), or when our own mover, whose memory they are, is dead. If neither happens within
the quarantine time the mover is replaced. A source's death does *not* free them: its bytes may still be
on the way or in our mover's socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_plugin.protocol import Declined, Ended
from engine_plugin.transport.control.outbound import MoveCall
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.stats import TransportStats


def settled(outcome: Ended | Declined | None) -> bool:
    """Whether no write of a move with this outcome can arrive any more."""
    return isinstance(outcome, Declined) or (isinstance(outcome, Ended) and outcome.settled)


@dataclass(slots=True, eq=False)
class _Entry:
    call: MoveCall
    mover: Mover
    timer: asyncio.TimerHandle


class Quarantine:
    """The given-up moves of one transport; `usable` is called with the slots of each once it is over."""

    def __init__(
        self,
        limits: Limits,
        stats: TransportStats,
        retire: Callable[[Mover], None],
        usable: Callable[[Sequence[int]], None],
    ) -> None:
        self._limits = limits
        self._stats = stats
        self._retire = retire
        self._usable = usable
        self._entries: set[_Entry] = set()

    def hold(self, call: MoveCall, mover: Mover) -> None:
        """Quarantine the slots of `call`, which `mover`'s memory holds."""
        loop = asyncio.get_running_loop()
        entry = _Entry(call, mover, loop.call_later(self._limits.quarantine_s, self._retire, mover))
        self._entries.add(entry)
        self._stats.quarantined_slots += len(call.slots)
        mover.distrust(call.tag)

        def on_end(future: asyncio.Future[Ended | Declined | None]) -> None:
            if settled(future.result()):
                self._free(entry)

        call.ended.add_done_callback(on_end)
        mover.gone.add_done_callback(lambda _: self._free(entry))

    def _free(self, entry: _Entry) -> None:
        if entry not in self._entries:
            return
        self._entries.discard(entry)
        entry.timer.cancel()
        entry.mover.unexpect(entry.call.tag)
        if entry.call.window is not None:
            entry.mover.windows.give(entry.call.window)
        self._stats.quarantined_slots -= len(entry.call.slots)
        self._usable(entry.call.slots)
