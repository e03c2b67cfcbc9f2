"""What one engine will publish: gathered during a step, sent as one batch, as the engine plugin does.

Batches have the form that the live picker's decoder makes of a message (`epp.core.packed_events`).
"""

from __future__ import annotations

from collections.abc import Callable

from epp.core.packed_events import CLEARED, CPU, HAS_EXTRA, HAS_PARENT, RECORD, REMOVED, STORED, PackedBatch
from epp.core.types import CacheTier
from simulator.prompts import Content
from simulator.tiers import Names


class EventLog:
    """`publish` gets each batch, in order, without its digest."""

    def __init__(self, block_tokens: int, publish: Callable[[PackedBatch], None]) -> None:
        self._block_tokens = block_tokens
        self._publish = publish
        self.clear()

    def clear(self) -> None:
        """What was not sent is lost with its process."""
        self._records: list[bytes] = []
        self._names: list[Names] = []
        self._tokens: list[memoryview[int]] = []
        self._name_count = self._token_count = 0

    def stored(self, tier: CacheTier, content: Content, first: int, fresh: bytes) -> None:
        """One event for each run of `fresh` blocks from block `first` of a text on."""
        size, end = self._block_tokens, 0
        while (at := fresh.find(1, end)) >= 0:
            end = fresh.find(0, at)
            end = len(fresh) if end < 0 else end
            begin, stop = first + at, first + end
            flags = HAS_EXTRA | (HAS_PARENT if begin else 0) | (CPU if tier is CacheTier.CPU else 0)
            parent = content.names[begin - 1] if begin else 0
            self._add(parent, STORED, flags, stop - begin, (stop - begin) * size)
            self._names.append(content.names[begin:stop])
            self._tokens.append(content.tokens[begin * size : stop * size])

    def removed(self, tier: CacheTier, names: Names) -> None:
        if names:
            self._add(0, REMOVED, CPU if tier is CacheTier.CPU else 0, len(names), 0)
            self._names.append(names)

    def all_cleared(self) -> None:
        self._add(0, CLEARED, 0, 0, 0)

    def _add(self, parent: int, kind: int, flags: int, names: int, tokens: int) -> None:
        size = self._block_tokens if tokens else 0
        extras = names if flags & HAS_EXTRA else 0  # one a block, all of them empty
        first_name, first_token = self._name_count, self._token_count
        self._records.append(
            RECORD.pack(parent, kind, flags, first_name, names, first_token, tokens, size, extras, 0, 0, 0, 0)
        )
        self._name_count += names
        self._token_count += tokens

    def flush(self) -> None:
        """Publish what has gathered."""
        if self._records:
            table, names, tokens = b"".join(self._records), b"".join(self._names), b"".join(self._tokens)
            self.clear()
            self._publish(PackedBatch(table, names, tokens, (), (), 0, 0))
