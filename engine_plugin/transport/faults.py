"""Faults on purpose, for tests and the demo; inert unless a `Faults` is passed to `PeerTransport`.

All of them act on the *producer* side and may be changed while the transport runs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Faults:
    """What the producer shall do wrong.

    hold_after_chunks: every move stops after so many chunks until `proceed` is set. `holding` is
        set (and stays set) once a move has come to that point: wait for it, then kill or stop.
    stall_lookup: look-ups are accepted and never answered (until `proceed` is set).
    corrupt_block: index (in the offer) of a block whose announced checksum is falsified, so that the
        consumer finds a mismatch as it would for a torn write.
    throttle_bytes_per_s: a move starts only after its bytes would have crossed a link that slow.
    """

    hold_after_chunks: int | None = None
    stall_lookup: bool = False
    corrupt_block: int | None = None
    throttle_bytes_per_s: int | None = None
    proceed: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
