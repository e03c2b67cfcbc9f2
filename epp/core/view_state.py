"""What a cache view keeps and tells of one endpoint: its stream, counters, and a snapshot of both.

Plain values; the rules are in `cache_view`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_plugin.identity import EndpointId
from epp.core.adoption import Overlap
from epp.core.event_stream import EventStream
from epp.core.events import Applied, ReplayNeeded
from epp.core.hashing import Family, PromptKeys
from epp.core.prefix_index import IndexStats
from epp.core.types import ClaimState, PrefixMatch


@dataclass(slots=True)
class ViewCounters:
    """Totals of one endpoint since it was added; plain values for telemetry."""

    live_batches: int = 0
    replayed_batches: int = 0
    applied_batches: int = 0
    duplicate_batches: int = 0
    undecodable_batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphan_blocks: int = 0
    unresolved_blocks: int = 0
    skipped_blocks: int = 0
    refused_blocks: int = 0
    windowed_blocks: int = 0
    unsupported_blocks: int = 0
    unknown_events: int = 0
    gaps: int = 0
    restarts: int = 0
    replays: int = 0  # asked for, with whatever reason
    failed_replays: int = 0
    clears: int = 0
    snapshots_confirmed: int = 0  # a sibling's view that the engine's replay agreed with
    snapshots_refused: int = 0  # a sibling's view that was dropped
    distrusted: int = 0  # claims dropped because of other signs than events

    def count_applied(self, applied: Applied, batches: int) -> None:
        """Mutates: `batches` are in the index now."""
        self.applied_batches += batches
        self.stored_blocks += applied.stored_blocks
        self.removed_blocks += applied.removed_blocks
        self.orphan_blocks += applied.orphan_blocks
        self.unresolved_blocks += applied.unresolved_blocks
        self.skipped_blocks += applied.skipped_blocks
        self.refused_blocks += applied.refused_blocks
        self.windowed_blocks += applied.windowed_blocks
        self.unsupported_blocks += applied.unsupported_blocks

    def count_replay(self, replay: ReplayNeeded) -> None:
        """Mutates: a replay was asked for."""
        self.replays += 1
        if replay.reason == "gap":
            self.gaps += 1
        elif replay.reason == "restart":
            self.restarts += 1


@dataclass(frozen=True, slots=True)
class ViewStats:
    """One endpoint's cache view now."""

    state: ClaimState
    known_empty_start: bool
    index: IndexStats
    counters: ViewCounters
    held_batches: int  # waiting for a replay to end
    last_event_s: float | None  # when the last batch came, on the caller's clock
    speculative_entries: int = 0  # prompts sent there and not confirmed; overdue ones until swept

    @property
    def deaf(self) -> bool:
        """Traffic, but not one block applied: the engine speaks a form that we do not understand."""
        counters = self.counters
        idle = counters.stored_blocks == 0 and counters.removed_blocks == 0
        lost = counters.undecodable_batches + counters.unknown_events + counters.skipped_blocks
        return idle and lost + counters.refused_blocks + counters.unsupported_blocks > 0


@dataclass(frozen=True, slots=True)
class LookUp:
    """What the view says of one prompt, and what `place` needs to remember where it went."""

    matches: Mapping[EndpointId, PrefixMatch]
    keys: Mapping[Family, PromptKeys] = field(default_factory=dict)  # empty without speculation


class Standing(NamedTuple):
    """How far one endpoint can be spoken for. `state` None: it was not added."""

    state: ClaimState | None
    block_size_tokens: int
    from_empty: bool  # a claim, and heard from the engine's first event on
    claims: bool


@dataclass(slots=True)
class View:
    """All that is kept of one endpoint besides the index."""

    stream: EventStream
    model: str = ""
    counters: ViewCounters = field(default_factory=ViewCounters)
    last_event_s: float | None = None
    overlap: Overlap | None = None  # while a sibling's view waits for the engine's word
    pull_misses: int = 0  # in a row
    standing: Standing | None = None  # None: stream or index have changed since it was last asked for
