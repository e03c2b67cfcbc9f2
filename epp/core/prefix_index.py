"""Which endpoint holds how much of a prompt, in which tier, exactly as the engines reported it.

`PrefixIndex` (`index_interface`) is the interface; `PythonPrefixIndex` is the reference implementation,
which always works and which any compiled twin has to agree with. Nothing is guessed: a block whose
content an event does not prove makes no claim and is counted. Linear walk, interned bitsets, one hash pass.

It must not know sequence numbers or claim states (`event_stream`), nor time, nor I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from engine_plugin.identity import EndpointId
from epp.core.block_table import ANY_LANE, CPU_LANE, DEVICE_LANE, LANES, require
from epp.core.engine_blocks import EngineBlocks
from epp.core.events import (
    BlockStored,
)
from epp.core.group_events import (
    keys_in_main_group,
)
from epp.core.hashing import (
    BlockHasher,
    Family,
    PromptKeys,
    pack_tokens,
)
from epp.core.index_dump import (
    Columns,
    DumpRefused,
    EndpointDump,
    Frozen,
    FrozenRecords,
    check_dump,
    dump_groups,
    load_records,
    restore_groups,
)
from epp.core.index_interface import Depths as Depths
from epp.core.index_interface import IndexStats as IndexStats
from epp.core.index_interface import PrefixIndex as PrefixIndex
from epp.core.index_interface import PrefixQuery as PrefixQuery
from epp.core.index_writer import IndexWriter
from epp.core.types import BlockKey, CacheTier, EngineBlockHash


class PythonPrefixIndex(IndexWriter):
    """The reference implementation."""

    scheme = BlockHasher.scheme

    # --- reading --------------------------------------------------------------------------------

    def depths(
        self,
        query: PrefixQuery,
        endpoints: Iterable[EndpointId],
        keys: dict[Family, PromptKeys] | None = None,
    ) -> dict[EndpointId, Depths]:
        result: dict[EndpointId, Depths] = {}
        families: dict[Family, list[tuple[EndpointId, int]]] = {}
        for endpoint in endpoints:
            known = self._endpoints[endpoint]
            result[endpoint] = Depths()
            if known.blocks.block_size_tokens:
                family = (known.model, known.blocks.block_size_tokens)
                families.setdefault(family, []).append((endpoint, known.blocks.slot))
        packed = pack_tokens(query.token_ids) if families else b""
        for (model, size), members in families.items():
            root = self._hasher.root(model, query.lora_name, query.cache_salt)
            chain = self._hasher.chain(root, packed, size)
            if keys is not None:
                keys[model, size] = array("Q", chain)
            depths = self._table.depths(chain, [slot for _, slot in members])
            for endpoint, slot in members:
                base = slot * LANES
                result[endpoint] = Depths(
                    depths[base + ANY_LANE], depths[base + DEVICE_LANE], depths[base + CPU_LANE]
                )
            self._limit(result, chain, [e for e, _ in members if self._endpoints[e].blocks.groups])
        return result

    def _limit(
        self, found: dict[EndpointId, Depths], keys: list[BlockKey], endpoints: Iterable[EndpointId]
    ) -> None:
        """Cut what was found at `endpoints` to what their other groups can serve, too."""
        for endpoint in endpoints:
            blocks = self._endpoints[endpoint].blocks
            size = blocks.block_size_tokens
            assert blocks.groups is not None
            if blocks.groups.refusal(size):
                found[endpoint] = Depths()
            elif found[endpoint].blocks:
                found[endpoint] = Depths(*blocks.groups.usable(keys, found[endpoint], size))

    def block_size_tokens(self, endpoint: EndpointId) -> int:
        return self._endpoints[endpoint].blocks.block_size_tokens

    def stats(self, endpoint: EndpointId) -> IndexStats:
        blocks = self._endpoints[endpoint].blocks
        groups = blocks.groups
        return IndexStats(
            device_blocks=blocks.claims[CacheTier.DEVICE],
            cpu_blocks=blocks.claims[CacheTier.CPU],
            waiting_blocks=blocks.waiting,
            forgotten_waiting_blocks=blocks.forgotten_waiting + (groups.forgotten if groups else 0),
            block_size_tokens=blocks.block_size_tokens,
            refused_blocks=blocks.refused + (groups.refused if groups else 0),
            window_blocks=groups.blocks if groups else 0,
            unsupported=self.unsupported(endpoint),
        )

    def unsupported(self, endpoint: EndpointId) -> str:
        blocks = self._endpoints[endpoint].blocks
        return "" if blocks.groups is None else blocks.groups.refusal(blocks.block_size_tokens)

    def key_of(self, endpoint: EndpointId, name: EngineBlockHash) -> BlockKey | None:
        return self._endpoints[endpoint].blocks.key_of(self._hasher.name(name))

    def stored_keys(self, endpoint: EndpointId, event: BlockStored) -> list[BlockKey]:
        known = self._endpoints[endpoint]
        return keys_in_main_group(known.blocks, event, self._hasher, self._parent_key(known, event))

    def names_of_sample(self, endpoint: EndpointId) -> dict[BlockKey, EngineBlockHash]:
        return self._endpoints[endpoint].blocks.sampled_names()

    @property
    def total_bytes(self) -> int:
        return self._table.budget.total_bytes

    # --- dump and restore -----------------------------------------------------------------------

    def dump(self, endpoint: EndpointId) -> EndpointDump:
        *_, dump = self.dump_steps(endpoint, 1 << 62)
        assert dump is not None
        return dump

    def dump_steps(self, endpoint: EndpointId, step_blocks: int) -> Iterator[EndpointDump | None]:
        known = self._endpoints[endpoint]
        blocks = known.blocks
        groups, all_groups_whole = dump_groups(blocks.groups)
        frame = EndpointDump(
            scheme=self._hasher.scheme,
            model=known.model,
            block_size_tokens=blocks.block_size_tokens,
            **Columns()._asdict(),
            complete=all_groups_whole and not blocks.waiting,
            groups=groups,
            main_group=blocks.main_group,
        )
        return _dumped(frame, self._freeze(blocks), step_blocks)

    def _freeze(self, blocks: EngineBlocks) -> Frozen:
        return FrozenRecords(blocks)

    def restore(self, endpoint: EndpointId, dump: EndpointDump) -> None:
        for _ in self.restore_steps(endpoint, dump, len(dump.names) or 1):
            pass

    def restore_steps(self, endpoint: EndpointId, dump: EndpointDump, step_blocks: int) -> Iterator[int]:
        known = self._endpoints[endpoint]
        blocks = known.blocks
        if not blocks.is_pristine:
            raise DumpRefused("not_empty")
        check_dump(dump, self._hasher.scheme, known.model, self._limits)
        try:
            blocks.block_size_tokens, blocks.main_group = dump.block_size_tokens, dump.main_group
            load = self._loader(blocks, dump)
            for start in range(0, dump.blocks, step_blocks):
                if known.blocks is not blocks or self._endpoints.get(endpoint) is not known:
                    raise DumpRefused("overtaken")
                stop = min(start + step_blocks, dump.blocks)
                load(start, stop)
                yield stop
            if dump.groups:
                restore_groups(self._groups_of(blocks), dump)
        except DumpRefused:
            if known.blocks is blocks and self._endpoints.get(endpoint) is known:
                self.clear(endpoint)
            raise

    def _loader(self, blocks: EngineBlocks, dump: EndpointDump) -> Callable[[int, int], None]:
        """What takes over part [start, stop) of a dump."""

        def load(start: int, stop: int) -> None:
            load_records(blocks, dump.records(start, stop), self._limits, self._table.budget)

        return load

    def __len__(self) -> int:
        """Distinct blocks that anybody holds (cleared ones included until swept)."""
        return len(self._table)

    def check_integrity(self) -> None:
        expected: dict[BlockKey, int] = {}
        live = [known.blocks for known in self._endpoints.values()]
        for blocks in live:
            blocks.check_integrity()
        for blocks in [*live, *self._cleared]:
            base = blocks.slot * LANES
            for key, tier in blocks.held():
                lane = DEVICE_LANE if tier is CacheTier.DEVICE else CPU_LANE
                expected[key] = expected.get(key, 0) | 1 << base + lane | 1 << base + ANY_LANE
        self._table.check_integrity(expected)
        self._check_bytes([*live, *self._cleared])
        slots = [blocks.slot for blocks in [*live, *self._cleared]] + self._slots.free
        require(sorted(slots) == list(range(self._slots.count)), "slots are off")

    def _check_bytes(self, blocks: Iterable[EngineBlocks]) -> None:
        require(
            self._table.budget.endpoint_bytes == sum(b.own_bytes for b in blocks),
            "bytes of endpoints are off",
        )


def _dumped(frame: EndpointDump, frozen: Frozen, step_blocks: int) -> Iterator[EndpointDump | None]:
    while frozen.step(step_blocks):
        yield None
    columns, whole = frozen.columns()
    yield replace(frame, **columns._asdict(), complete=frame.complete and whole)
