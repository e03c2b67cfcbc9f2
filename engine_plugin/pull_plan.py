"""How the blocks of one pull are cut into transfers. Pure: slots in, chunks of byte ranges out.

Why: page-sized transfers cannot fill a link (a descriptor costs more than its bytes below 64 KB), and
one transfer of everything cannot be stopped half way. So slots that are neighbours on *both* sides
become one run, and runs are cut and packed into chunks of a few MB, of which a few are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """One descriptor: `length` bytes at `source` go to `target` (offsets into the two tiers)."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One transfer: some segments, posted and completed together."""

    segments: tuple[Segment, ...]
    total_bytes: int


def merge(source_slots: Sequence[int], target_slots: Sequence[int], slot_bytes: int) -> Iterator[Segment]:
    """Runs of slots that are neighbours, in the same order, on both sides.

    Raises:
        ValueError: the two sides differ in length, or a target slot occurs twice.
    """
    if len(source_slots) != len(target_slots):
        raise ValueError(f"{len(source_slots)} source slots for {len(target_slots)} target slots")
    if len(set(target_slots)) != len(target_slots):
        raise ValueError("a target slot occurs twice")
    start = 0
    for at in range(1, len(source_slots) + 1):
        if at < len(source_slots) and (
            source_slots[at] == source_slots[at - 1] + 1 and target_slots[at] == target_slots[at - 1] + 1
        ):
            continue
        yield Segment(
            source_slots[start] * slot_bytes, target_slots[start] * slot_bytes, (at - start) * slot_bytes
        )
        start = at


def cut(segments: Iterator[Segment], chunk_bytes: int) -> Iterator[Chunk]:
    """Chunks of exactly `chunk_bytes` (the last may be shorter), in order; long runs are split."""
    if chunk_bytes <= 0:
        raise ValueError(f"chunks of {chunk_bytes} bytes")
    pending: list[Segment] = []
    filled = 0
    for segment in segments:
        at = 0
        while at < segment.length:
            length = min(segment.length - at, chunk_bytes - filled)
            pending.append(Segment(segment.source + at, segment.target + at, length))
            at += length
            filled += length
            if filled == chunk_bytes:
                yield Chunk(tuple(pending), filled)
                pending, filled = [], 0
    if pending:
        yield Chunk(tuple(pending), filled)


def descriptors_pay(segments: Sequence[Segment], least_bytes: int) -> bool:
    """Whether the average descriptor is worth its cost."""
    return sum(segment.length for segment in segments) >= least_bytes * len(segments)


def plan(
    source_slots: Sequence[int], target_slots: Sequence[int], slot_bytes: int, chunk_bytes: int
) -> list[Chunk]:
    """The whole pull: merged, then cut. Raises ValueError as `merge` and `cut` do."""
    return list(cut(merge(source_slots, target_slots, slot_bytes), chunk_bytes))
