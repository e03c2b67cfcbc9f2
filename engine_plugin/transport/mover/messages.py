"""What an engine and its own mover say to each other over their socket pair. Values and codec only.

The same framing as between peers. Both ends are ours and of one version, but the mover handles
strangers' metadata, so what it says is decoded as strictly as anything else.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from engine_plugin.protocol import FrameError

LINK_FRAME_BYTES: Final = 32 << 20


class Order(msgspec.Struct, frozen=True, tag_field="type"):
    """Engine to mover."""


class AddPeer(Order, frozen=True, tag="add"):
    """Load the metadata of a peer's mover and connect to it ahead of need.

    Counted, so two sessions of one peer are fine.
    """

    agent: str
    metadata: bytes


class DropPeer(Order, frozen=True, tag="drop"):
    """Forget it once as many drops as adds came and none of its moves is unresolved."""

    agent: str


class StartMove(Order, frozen=True, tag="move"):
    """Write local slots into the peer's slots, then notify the peer's mover with `tag`."""

    tag: str
    agent: str
    source_slots: list[int]
    target_slots: list[int]
    target_base: int
    chunk_bytes: int
    chunks_in_flight: int
    hold_after_chunks: int | None = None
    window_address: int = 0  # where the peer takes all blocks packed, in order; 0: nowhere


class Scatter(Order, frozen=True, tag="scatter"):
    """What lies in our inbox from `offset` on belongs into these slots: answered with `Scattered`."""

    tag: str
    offset: int
    slots: list[int]


class Proceed(Order, frozen=True, tag="proceed"):
    """Let a held move go on."""

    tag: str


class CancelMove(Order, frozen=True, tag="cancel"):
    """Post nothing more; the move ends when what was posted has resolved."""

    tag: str


class Expect(Order, frozen=True, tag="expect"):
    """A peer will write here and notify with `tag`: make progress until then or until `Unexpect`."""

    tag: str


class Unexpect(Order, frozen=True, tag="unexpect"):
    """That write is resolved."""

    tag: str


class Wake(Order, frozen=True, tag="wake"):
    """A peer is about to connect to this mover: make progress for a moment, so that it can."""


class Alive(Order, frozen=True, tag="alive"):
    """Answer with `Living`: a mover that hangs is replaced."""


class Report(msgspec.Struct, frozen=True, tag_field="type"):
    """Mover to engine."""


class Ready(Report, frozen=True, tag="ready"):
    """The agent is up and the tier registered."""

    agent: str
    metadata: bytes
    base_address: int
    inbox_address: int = 0
    inbox_bytes: int = 0


class Scattered(Report, frozen=True, tag="scattered"):
    """The blocks of that move are in their slots."""

    tag: str


class Wrote(Report, frozen=True, tag="wrote"):
    """Chunks of a move completed so far."""

    tag: str
    chunks: int


class Held(Report, frozen=True, tag="held"):
    """The move has come to its `hold_after_chunks`, with nothing in flight."""

    tag: str


class MoveEnded(Report, frozen=True, tag="ended"):
    """Every posted transfer of the move has resolved, or its peer is lost.

    `settled`: all of them completed, so no byte can arrive at the peer any more.
    """

    tag: str
    reason: Literal["done", "cancelled", "failed"]
    settled: bool
    written_bytes: int
    detail: str = ""
    packed: bool = False  # it was written into the window and not into the slots


class Arrived(Report, frozen=True, tag="arrived"):
    """A peer's notification: everything of that move is in our memory."""

    tag: str


class Living(Report, frozen=True, tag="living"):
    """The loop turns."""


AnyOrder = AddPeer | DropPeer | StartMove | Scatter | Proceed | CancelMove | Expect | Unexpect | Wake | Alive
AnyReport = Ready | Wrote | Held | MoveEnded | Arrived | Scattered | Living

_orders: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)
_reports: msgspec.msgpack.Decoder[AnyReport] = msgspec.msgpack.Decoder(AnyReport)


def decode_order(payload: bytes) -> AnyOrder:
    """Raises FrameError."""
    try:
        return _orders.decode(payload)
    except msgspec.DecodeError as exc:
        raise FrameError(f"not an order: {exc}") from exc


def decode_report(payload: bytes) -> AnyReport:
    """Raises FrameError."""
    try:
        return _reports.decode(payload)
    except msgspec.DecodeError as exc:
        raise FrameError(f"not a report: {exc}") from exc
