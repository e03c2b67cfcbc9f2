"""What an event stream asks of its owner, and what bounds it. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from epp.core.events import Batch, ReplayNeeded


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds per endpoint."""

    held_batches: int = 4_096  # live batches waiting for a replay; oldest dropped first (replayed again)
    held_events: int = 262_144
    held_bytes: int = 32 << 20  # one batch can take that much; the newest is kept whatever it takes
    digests: int = 8_192  # how far back a repeated batch is told from a restarted engine's
    failed_replays: int = 3  # in a row, then the engine is treated as having no replay socket


@dataclass(slots=True)
class RunningReplay:
    """What an event stream knows of the replay it has asked for."""

    verify_seq: int | None  # must be repeated as we applied it; None: it was, or there is none
    unread_seq: int | None  # the newest unreadable live batch when it was asked for
    progressed: bool = False  # brought at least one batch that we did not have


@dataclass(frozen=True, slots=True)
class Step:
    """What the owner has to do, in this order."""

    clear: bool = False
    apply: tuple[Batch, ...] = ()
    replay: ReplayNeeded | None = None
    duplicate: bool = False
    held: bool = False


NOTHING = Step()
DUPLICATE = Step(duplicate=True)
HELD = Step(held=True)
