"""The moves of one mover: which chunk is posted next, and when a move is over. No I/O but the agent.

Moves take turns, one chunk each, so that a big pull does not starve the others. A move ends only when
every chunk it posted has resolved; that is what makes "settled" true. A peer that never resolves keeps
its move here until its process dies or this one does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from engine_plugin import pull_plan
from engine_plugin.pull_plan import Chunk, Segment
from engine_plugin.transport.mover.agent import Agent, PeerLost
from engine_plugin.transport.mover.messages import Held, MoveEnded, Report, StartMove, Wrote
from engine_plugin.transport.mover.staging import PACKED_BELOW_BYTES, Staging


@dataclass(frozen=True, slots=True)
class _Posted:
    """A transfer under way. `cell`: of the staging that it was gathered into."""

    handle: Any
    size: int
    cell: int | None = None


@dataclass(slots=True)
class _Move:
    order: StartMove
    waiting: deque[Chunk]
    packed: deque[range] = field(default_factory=deque)  # instead: places in the order, a chunk each
    posted: list[_Posted] = field(default_factory=list)
    chunks_posted: int = 0
    chunks_written: int = 0
    written_bytes: int = 0
    held: bool = False
    hold_at: int | None = None
    cancelled: bool = False
    lost: str | None = None
    was_packed: bool = False

    @property
    def unposted(self) -> bool:
        return bool(self.waiting or self.packed)

    def post_no_more(self) -> None:
        self.waiting.clear()
        self.packed.clear()


class Moves:
    """Every unresolved move. `step` makes progress; what happened goes to `report`."""

    def __init__(
        self,
        agent: Agent,
        slots: int,
        slot_bytes: int,
        report: Callable[[Report], None],
        staging: Staging | None = None,
    ) -> None:
        self._agent = agent
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._report = report
        self._staging = staging
        self._moves: dict[str, _Move] = {}
        self._dropped: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether `step` has anything to do soon (a held move with nothing posted has not)."""
        return any(move.posted or not move.held for move in self._moves.values())

    def start(self, order: StartMove) -> None:
        """Plan a move and let it take turns; a bad order ends at once."""
        if max(order.source_slots, default=0) >= self._slots:
            self._end_at_once(order, f"source slot out of {self._slots}")
            return
        try:
            if not self._to(order.agent):
                self._agent.prepare(order.agent)
            self._moves[order.tag] = self._plan(order)
        except (PeerLost, ValueError) as exc:
            self._end_at_once(order, str(exc))

    def _plan(self, order: StartMove) -> _Move:
        segments = list(pull_plan.merge(order.source_slots, order.target_slots, self._slot_bytes))
        move = _Move(order, deque(), hold_at=order.hold_after_chunks)
        staging = self._staging
        if staging is None or not order.window_address:
            packs = False
        else:
            packs = not pull_plan.descriptors_pay(segments, PACKED_BELOW_BYTES)
        if packs and staging is not None:
            blocks = len(order.source_slots)
            each = max(1, min(staging.cell_blocks, order.chunk_bytes // self._slot_bytes))
            move.packed.extend(range(at, min(at + each, blocks)) for at in range(0, blocks, each))
            move.was_packed = True
        else:
            move.waiting.extend(pull_plan.cut(iter(segments), order.chunk_bytes))
        return move

    def proceed(self, tag: str) -> None:
        """A held move goes on."""
        if (move := self._moves.get(tag)) is not None:
            move.held, move.hold_at = False, None

    def cancel(self, tag: str) -> None:
        """Post nothing more of `tag`."""
        if (move := self._moves.get(tag)) is not None:
            move.cancelled, move.held = True, False
            move.post_no_more()

    def cancel_all(self) -> None:
        """The same for every move."""
        for tag in self._moves:
            self.cancel(tag)

    def drop_peer(self, agent: str) -> None:
        """Forget a peer as soon as no move to it is unresolved."""
        if self._agent.drop_peer(agent):
            self._dropped.add(agent)
            self._forget_quiet_peers()

    def step(self) -> bool:
        """Poll what is posted, post what may be; True if anything completed or was posted."""
        moved = False
        for tag, move in list(self._moves.items()):
            moved |= self._poll(move)
            moved |= self._post(move)
            if self._over(move):
                del self._moves[tag]
                self._finish(move)
                self._forget_quiet_peers()
        return moved

    def _to(self, agent: str) -> bool:
        return any(move.order.agent == agent for move in self._moves.values())

    def _poll(self, move: _Move) -> bool:
        still: list[_Posted] = []
        written = 0
        for posted in move.posted:
            try:
                done = self._agent.resolved(move.order.agent, posted.handle)
            except PeerLost as exc:
                self._lose(move, exc)
                self._give(posted.cell)
                continue
            if not done:
                still.append(posted)
                continue
            self._give(posted.cell)
            written += 1
            move.written_bytes += posted.size
        resolved = len(still) != len(move.posted)
        move.posted = still
        if written:
            move.chunks_written += written
            self._report(Wrote(move.order.tag, move.chunks_written))
        return resolved

    def _post(self, move: _Move) -> bool:
        posted = False
        while move.unposted and not move.held and len(move.posted) < move.order.chunks_in_flight:
            if move.hold_at is not None and move.chunks_posted >= move.hold_at:
                if not move.posted:
                    move.held = True
                    self._report(Held(move.order.tag))
                break
            try:
                started = self._post_packed(move) if move.packed else self._post_chunk(move)
            except PeerLost as exc:
                self._lose(move, exc)
                break
            if started is None:
                break
            move.posted.append(started)
            move.chunks_posted += 1
            posted = True
        return posted

    def _post_chunk(self, move: _Move) -> _Posted:
        chunk = move.waiting.popleft()
        handle = self._agent.post(move.order.agent, chunk, move.order.target_base)
        return _Posted(handle, chunk.total_bytes)

    def _post_packed(self, move: _Move) -> _Posted | None:
        """One cell of blocks, gathered; None while other transfers have all cells."""
        assert self._staging is not None
        cell = self._staging.take()
        if cell is None:
            return None
        places = move.packed.popleft()
        source = self._staging.gather(cell, move.order.source_slots[places.start : places.stop])
        size = len(places) * self._slot_bytes
        chunk = Chunk((Segment(0, places.start * self._slot_bytes, size),), size)
        try:
            handle = self._agent.post(move.order.agent, chunk, move.order.window_address, source)
        except PeerLost:
            self._staging.give(cell)
            raise
        return _Posted(handle, size, cell)

    def _give(self, cell: int | None) -> None:
        if cell is not None and self._staging is not None:
            self._staging.give(cell)

    @staticmethod
    def _lose(move: _Move, exc: PeerLost) -> None:
        move.lost = move.lost or str(exc)
        move.post_no_more()
        move.held = False

    @staticmethod
    def _over(move: _Move) -> bool:
        return not move.posted and not move.unposted

    def _finish(self, move: _Move) -> None:
        order = move.order
        reason: Literal["done", "cancelled", "failed"] = "cancelled" if move.cancelled else "done"
        if move.lost is None and reason == "done":
            try:
                self._agent.notify(order.agent, order.tag)
            except PeerLost as exc:
                move.lost = str(exc)
        if move.lost is not None:
            reason = "failed"
        settled, detail = move.lost is None, move.lost or ""
        self._report(
            MoveEnded(order.tag, reason, settled, move.written_bytes, detail, packed=move.was_packed)
        )

    def _end_at_once(self, order: StartMove, detail: str) -> None:
        self._report(MoveEnded(order.tag, "failed", True, 0, detail))

    def _forget_quiet_peers(self) -> None:
        for agent in [agent for agent in self._dropped if not self._to(agent)]:
            self._dropped.discard(agent)
            self._agent.forget_peer(agent)
