"""What one engine will publish: gathered during a step, sent as one batch, as the engine plugin does."""

from __future__ import annotations

from collections.abc import Callable

from epp.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from epp.core.types import CacheTier
from simulator.prompts import Content, hashes_of


class EventLog:
    """`publish` gets each batch, in order."""

    def __init__(self, block_tokens: int, publish: Callable[[list[Event]], None]) -> None:
        self._block_tokens = block_tokens
        self._publish = publish
        self._events: list[Event] = []

    def stored(self, tier: CacheTier, content: Content, first: int, fresh: list[bool]) -> None:
        """One event for each run of `fresh` blocks from block `first` of a text on."""
        size, end = self._block_tokens, 0
        while True in fresh[end:]:
            at = fresh.index(True, end)
            end = fresh.index(False, at) if False in fresh[at:] else len(fresh)
            begin, stop = first + at, first + end
            self._events.append(
                BlockStored(
                    tier,
                    content.hashes[begin:stop],
                    content.hashes[begin - 1] if begin else None,
                    content.tokens[begin * size : stop * size],
                    size,
                    has_extra_keys=True,
                )
            )

    def removed(self, tier: CacheTier, names: tuple[bytes, ...]) -> None:
        if names:
            self._events.append(BlockRemoved(tier, hashes_of(names)))

    def all_cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def clear(self) -> None:
        """What was not sent is lost with its process."""
        self._events.clear()

    def flush(self) -> None:
        """Publish what has gathered."""
        if self._events:
            events, self._events = self._events, []
            self._publish(events)
