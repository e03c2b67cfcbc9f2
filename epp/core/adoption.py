"""A cache view taken over from a sibling picker: what it consists of, and what can be checked of it.

The sibling's view claims nothing until the engine itself has repeated the last batches before the
sibling's position (`event_stream`). Those batches also say what the view must contain: a block that
one of them stored is there under exactly the key that we compute from the batch, unless a later one
removed it. That finds a view of another engine, another seed, or a damaged one. It cannot find claims
about blocks of which those batches say nothing: for them the sibling is believed, as its certificate
warrants, until the engine removes or clears them. A wrong one costs a worse placement or a pull that
finds nothing, never a wrong answer.

Pure; it must not know how a view travels.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from engine_plugin.identity import EndpointId
from epp.core.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from epp.core.index_dump import EndpointDump
from epp.core.stream_position import MAX_OVERLAP_BATCHES, StreamPosition
from epp.core.types import BlockKey, EngineBlockHash

_MAX_OVERLAP_BLOCKS = 4_096  # of a longer overlap only the end is checked: it is one step on the loop


class AdoptionRefused(ValueError):
    """The view is not taken over. `reason` is a stable label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ExportedView:
    """One endpoint as a picker with a claim sees it."""

    position: StreamPosition
    dump: EndpointDump


class KeyedBlocks(Protocol):
    """What the check reads of the index."""

    def stored_keys(self, endpoint: EndpointId, event: BlockStored) -> list[BlockKey]: ...

    def key_of(self, endpoint: EndpointId, name: EngineBlockHash) -> BlockKey | None: ...


class Overlap:
    """The batches that both the sibling and the engine told us, oldest first."""

    def __init__(self, complete: bool) -> None:
        """`complete`: nothing was left out of the view, so a block that is missing is a contradiction."""
        self._complete = complete
        self._batches: deque[tuple[int, Batch]] = deque()
        self._blocks = 0

    def hear(self, seq: int, batch: Batch) -> None:
        """One repeated batch. A replay that begins anew is heard anew."""
        if self._batches and seq <= self._batches[-1][0]:
            self._batches.clear()
            self._blocks = 0
        self._batches.append((seq, batch))
        self._blocks += _blocks(batch)
        while self._blocks > _MAX_OVERLAP_BLOCKS or len(self._batches) > MAX_OVERLAP_BATCHES:
            self._blocks -= _blocks(self._batches.popleft()[1])

    def contradicts(self, index: KeyedBlocks, endpoint: EndpointId) -> bool:
        """Whether the index lacks what these batches put there, or knows it as something else."""
        gone: set[EngineBlockHash] = set()  # removed by a later event
        for _, batch in reversed(self._batches):
            for event in reversed(batch.events):
                if isinstance(event, AllBlocksCleared):
                    return False
                if isinstance(event, BlockRemoved):
                    gone.update(event.hashes)
                elif self._is_denied(index, endpoint, event, gone):
                    return True
        return False

    def _is_denied(
        self, index: KeyedBlocks, endpoint: EndpointId, event: BlockStored, gone: set[EngineBlockHash]
    ) -> bool:
        for name, key in zip(event.hashes, index.stored_keys(endpoint, event), strict=False):
            known = index.key_of(endpoint, name)
            if known is None:
                if self._complete and name not in gone:
                    return True
            elif known != key:
                return True
        return False


def _blocks(batch: Batch) -> int:
    return sum(len(event.hashes) for event in batch.events if not isinstance(event, AllBlocksCleared))
