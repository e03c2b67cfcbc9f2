"""What breaks in a schedule of `soak_transport`, and how the blocks lie."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from tests.integration.transport.peer_process import PeerProcess, peer_process
from tests.integration.transport.rig import BLOCK_BYTES, PATIENT

BLOCKS: Final = 64
CHUNKS: Final = 8
CONVERSATION_BYTES: Final = 7000  # of the consumer, handshake to move
FAULTS: Final = ("kill_engine", "kill_mover", "stop_engine", "stop_mover", "stop_both", "kill_own_mover")
LINE_FAULTS: Final = ("stop_own_mover", "cut", "mute")
LIMITS: Final = replace(
    PATIENT,
    connect_s=1.0,
    handshake_s=2.0,
    progress_s=0.5,
    first_progress_s=1.0,
    quarantine_s=1.0,
    ping_s=0.25,
    silence_s=1.5,
    redial_s=0.05,
    redial_max_s=0.2,
    mover_silence_s=2.0,
)
PRODUCER_LIMITS: Final = {
    "lease_s": 3.0,
    "silence_s": 1.5,
    "mover_silence_s": 2.0,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How the blocks lie, at both ends: `apart` 2, in every other slot."""

    slot_bytes: int
    apart: int

    @property
    def slots(self) -> range:
        """Where a schedule's pull puts them."""
        return range(0, self.apart * BLOCKS, self.apart)

    @property
    def spare(self) -> range:
        """Where the pull after it does."""
        return range(self.apart * BLOCKS, 2 * self.apart * BLOCKS, self.apart)

    def new_producer(self) -> AbstractAsyncContextManager[PeerProcess]:
        limits = PRODUCER_LIMITS | {"chunk_bytes": BLOCKS * self.slot_bytes // CHUNKS}
        return peer_process(
            blocks=BLOCKS,
            slots=self.apart * BLOCKS,
            slot_bytes=self.slot_bytes,
            apart=self.apart,
            limits=limits,
        )


PLAIN: Final = Layout(BLOCK_BYTES, 1)
PACKED: Final = Layout(4096, 2)
LAYOUTS: Final = {"plain": PLAIN, "packed": PACKED}


@dataclass(frozen=True, slots=True)
class Schedule:
    """One fault. `bytes_in` None: when `chunks` have been written."""

    fault: str
    bytes_in: int | None
    chunks: int
    lasts_s: float
    fresh_session: bool

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        random = Random(seed)
        in_move = random.random() < 0.4
        return cls(
            random.choice(FAULTS + LINE_FAULTS),
            None if in_move else random.randrange(CONVERSATION_BYTES),
            random.randrange(1, 8),
            random.choice((0.0, 0.2, 1.0, 2.5)),
            random.random() < 0.7,
        )
