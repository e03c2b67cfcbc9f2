"""What the rest of the picker may ask of a prefix index, whichever implementation runs.

It must not know how anything is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine_plugin.identity import EndpointId
from epp.core.events import Applied, Batch, BlockStored, Event
from epp.core.hashing import Family, PromptKeys
from epp.core.index_dump import EndpointDump
from epp.core.types import BlockKey, EngineBlockHash


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A prompt, as far as cache contents depend on it."""

    token_ids: Sequence[int] = field(repr=False)
    lora_name: str | None = None
    cache_salt: str | None = field(default=None, repr=False)


class Depths(NamedTuple):
    """Contiguous blocks from block 0: in any tier (OR-ed per block), on the device, in CPU memory."""

    blocks: int = 0
    device_blocks: int = 0
    cpu_blocks: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """What the index holds of one endpoint."""

    device_blocks: int = 0
    cpu_blocks: int = 0
    waiting_blocks: int = 0  # orphans and token-less stores whose content is not known yet
    forgotten_waiting_blocks: int = 0  # waiting blocks given up because the bound was reached
    block_size_tokens: int = 0  # 0: not learned yet
    refused_blocks: int = 0  # not held because the index was at its byte bound
    window_blocks: int = 0  # held by sliding-window groups
    unsupported: str = ""  # why the endpoint makes no claim although its events are known


class PrefixIndex(Protocol):
    """Reads and writes of the index. Endpoints must be added first; unknown ones raise KeyError."""

    def add_endpoint(self, endpoint: EndpointId, model: str = "") -> None:
        """Mutates: start an empty record of `endpoint`; forgets an old one of the same name."""
        ...

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        """Mutates: forget everything about `endpoint`."""
        ...

    def apply(self, endpoint: EndpointId, events: Iterable[Event]) -> Applied:
        """Mutates: take over what the engine says, in order."""
        ...

    def apply_batch(self, endpoint: EndpointId, batch: Batch) -> Applied:
        """Mutates: `apply` for a whole message, in whatever form it is."""
        ...

    def clear(self, endpoint: EndpointId) -> None:
        """Mutates: drop all claims of `endpoint` at once, whatever their number."""
        ...

    def sweep(self, max_blocks: int) -> int:
        """Mutates: free up to `max_blocks` records of cleared endpoints; how many are left."""
        ...

    def depths(
        self,
        query: PrefixQuery,
        endpoints: Iterable[EndpointId],
        keys: dict[Family, PromptKeys] | None = None,
    ) -> dict[EndpointId, Depths]:
        """Contiguous prefix of the prompt at each endpoint. Mutates nothing of the index.

        `keys`, if given, receives the keys of all the prompt's whole blocks for every family among the
        endpoints (an endpoint whose block size is not learned has none); without it hashing may stop
        at the first block that nobody holds.

        Raises:
            InvalidTokens: the prompt's ids are no unsigned 32-bit integers.
        """
        ...

    def block_size_tokens(self, endpoint: EndpointId) -> int:
        """Learned from the endpoint's events; 0: not yet."""
        ...

    def unsupported(self, endpoint: EndpointId) -> str:
        """Why the endpoint can make no claim whatever it holds (`window_groups`); empty: it can."""
        ...

    def key_of(self, endpoint: EndpointId, name: EngineBlockHash) -> BlockKey | None:
        """Our key of a block of the endpoint's main group, if its content is known."""
        ...

    def stored_keys(self, endpoint: EndpointId, event: BlockStored) -> list[BlockKey]:
        """Under which keys `event` stores its blocks, as far as it proves them; mutates nothing."""
        ...

    def names_of_sample(self, endpoint: EndpointId) -> dict[BlockKey, EngineBlockHash]:
        """What the endpoint's engine calls a sample of its blocks (`name_sample`)."""
        ...

    def dump(self, endpoint: EndpointId) -> EndpointDump:
        """Everything held of the endpoint, for `restore` in an index of the same seed and scheme."""
        ...

    def dump_steps(self, endpoint: EndpointId, step_blocks: int) -> Iterator[EndpointDump | None]:
        """As `dump`, in steps that keep a loop free: None after each, the dump at last. It tells what was
        held when this was called, whatever happens to the endpoint between the steps."""
        ...

    def restore(self, endpoint: EndpointId, dump: EndpointDump) -> None:
        """Mutates: take over a dump; the endpoint must be added and empty.

        Raises:
            DumpRefused: not a dump that `dump` could have made here; the endpoint is empty again.
        """
        ...

    def restore_steps(self, endpoint: EndpointId, dump: EndpointDump, step_blocks: int) -> Iterator[int]:
        """As `restore`, in steps that keep a loop free; yields the blocks taken over. Apply nothing to
        the endpoint before the last step; clear it if that is not reached."""
        ...

    @property
    def total_bytes(self) -> int:
        """What the index takes, as counted against `IndexLimits.max_bytes`."""
        ...

    def stats(self, endpoint: EndpointId) -> IndexStats: ...

    def check_integrity(self) -> None:
        """Raises IndexCorrupt if the index contradicts itself. Slow: for tests."""
        ...
