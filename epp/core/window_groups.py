"""Cache groups of one endpoint besides its full-attention group: what they still allow to be claimed.

A hybrid model keeps several groups of blocks, evicts from each on its own, and can reuse a prefix only
as far as every group can serve it (case S-C18). Rules:

    sliding window     a prefix of d blocks needs the last ceil((window - 1) / block size) blocks before
                       d, fewer where d is smaller (vLLM 0.32, SlidingWindowManager)
    further full ones  all d blocks
    anything else      no rule: the endpoint makes no claim as long as the group is there, which is
                       until the next clear; a group is a property of the model

"Anything else": Mamba, chunked-local, unknown kinds, a window or a group number that is not told,
another block size, a group that contradicts itself, more groups than `MAX_GROUPS`, and a group of
which only removals were heard. Such blocks are not kept; the reason is (`refusal`).

Blocks are named alike in all groups of an engine, so a block whose own store does not say what it
contains is `awaited`: the owner calls `settle` as soon as the full-attention group knows the name.
Records are plain dicts in both implementations; the compiled one has its own lanes and its own walk
(`_compiled_windows.pxi`). It must not know the block table, slots, or hashing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from epp.core.block_table import require
from epp.core.byte_budget import GROUP_RECORD_BYTES, Account
from epp.core.events import FULL_ATTENTION_KINDS, SLIDING_WINDOW_KINDS, BlockStored
from epp.core.types import BlockKey, CacheTier, EngineBlockHash
from epp.core.window_group import MAX_WINDOW_TOKENS, HeldBlock, WindowGroup, refusal_of
from epp.core.window_walk import Lane, deepest

MAX_GROUPS = 64  # more than any model has; bounds what a hostile engine can add
REFUSALS = frozenset(
    {"group_kind", "group_window", "group_number", "group_block_size", "group_contradiction"}
)
_NAMELESS = None  # number of the group of all blocks that name none
_Record = tuple[EngineBlockHash, BlockKey, int, int]


class WindowGroups:
    """All of them. `refused`, as everything, counts since the last clear."""

    def __init__(self, account: Account, max_blocks: int, max_awaited: int) -> None:
        self.awaited: OrderedDict[EngineBlockHash, list[WindowGroup]] = OrderedDict()
        self.refused = 0
        self.forgotten = 0  # awaited blocks given up because the bound was reached
        self.account = account
        self._max_blocks = max_blocks
        self._max_awaited = max_awaited
        self._groups: dict[int | None, WindowGroup] = {}
        self._blocks = 0
        self._refusal = ""

    def __contains__(self, number: int | None) -> bool:
        return number in self._groups

    @property
    def blocks(self) -> int:
        """Records, whether their content is known or not."""
        return self._blocks

    @property
    def own_bytes(self) -> int:
        return self._blocks * GROUP_RECORD_BYTES

    def refusal(self, block_size_tokens: int) -> str:
        """Why an endpoint whose full-attention group has this block size may claim nothing; empty: it
        may. Stable labels."""
        if self._refusal:
            return self._refusal
        for group in self._groups.values():
            if block_size_tokens and group.block_size_tokens not in (0, block_size_tokens):
                return "group_block_size"
        return ""

    # --- events ---------------------------------------------------------------------------------

    def admit(self, event: BlockStored, main_group: int | None) -> bool:
        """Mutates: learn of the group from one of its stores. False: no rule for it."""
        group = self._group(event.group_idx)
        if event.group_idx not in self._groups or event.group_idx is _NAMELESS:
            group.kind, group.refusal = "nameless", "group_number"
        elif event.group_idx == main_group:
            group.kind, group.refusal = event.group_kind, "group_contradiction"
        elif not group.kind:
            group.kind = event.group_kind
            group.window_tokens = event.group_window_tokens or 0
            group.refusal = refusal_of(event)
        elif (group.kind, group.window_tokens) != (event.group_kind, event.group_window_tokens or 0):
            group.refusal = "group_contradiction"
        if event.token_ids is not None and event.block_size_tokens > 0:
            if group.block_size_tokens not in (0, event.block_size_tokens):
                group.refusal = "group_contradiction"
            group.block_size_tokens = event.block_size_tokens
        self._weigh()
        return not group.refusal

    def key_of(self, number: int | None, name: EngineBlockHash) -> BlockKey | None:
        held = self._groups[number].held.get(name)
        return None if held is None else held.key

    def hold_all(
        self,
        number: int | None,
        names: Sequence[EngineBlockHash],
        keys: Sequence[BlockKey],
        tier: CacheTier,
        may_grow: bool,
    ) -> bool:
        """Mutates: `hold` for a chain of blocks of which the admitted group knows none, at once; they count
        as "windowed". False: it knows some, or there may be no room; nothing was done."""
        group, count = self._groups[number], len(names)
        if (
            not may_grow
            or self._blocks + count > self._max_blocks
            or self.account.is_tight_with(count * GROUP_RECORD_BYTES)
            or not group.held.keys().isdisjoint(names)
            or len(set(names)) != count
        ):
            return False
        on_device = tier is CacheTier.DEVICE
        held, device, cpu = group.held, int(on_device), int(not on_device)
        for name, key in zip(names, keys, strict=True):
            held[name] = HeldBlock(key, device, cpu)
        for lane in (group.device if on_device else group.cpu, group.any):
            lane.add_all(keys)
        self._count(count)
        return True

    def hold(
        self,
        number: int | None,
        name: EngineBlockHash,
        key: BlockKey | None,
        tier: CacheTier,
        may_grow: bool = True,
    ) -> str:
        """Mutates: one more copy of block `name` in an admitted group. What it is to be counted as:
        "windowed", "skipped" (no room for it, or another content than before) or "refused" (no bytes)."""
        group = self._groups[number]
        held = group.held.get(name)
        if held is None:
            if self._blocks >= self._max_blocks:
                return "skipped"
            if not may_grow or self.account.is_full:
                self.refused += 1
                return "refused"
            held = group.held[name] = HeldBlock(key)
            self._count(1)
            if key is None:
                self.awaited.setdefault(name, []).append(group)
        elif held.key is None and key is not None:
            self._stop_awaiting(name, group)
            self._settle(group, held, key)
        elif key is not None and key != held.key:
            return "skipped"
        if tier is CacheTier.DEVICE:
            held.device += 1
            first = held.device == 1
        else:
            held.cpu += 1
            first = held.cpu == 1
        if first and held.key is not None:
            group.claim(held.key, tier)
        self._trim_awaited()
        return "windowed"

    def settle(self, name: EngineBlockHash, key: BlockKey) -> None:
        """Mutates: what an awaited block contains is known now."""
        for group in self.awaited.pop(name):
            self._settle(group, group.held[name], key)

    def remove(self, number: int | None, names: Sequence[EngineBlockHash], tier: CacheTier) -> None:
        """Mutates: one copy fewer of each. A group that was never heard of is one without a rule."""
        group = self._group(number)
        self._weigh()
        for name in names:
            held = group.held.get(name)
            if held is None or not (held.device if tier is CacheTier.DEVICE else held.cpu):
                continue
            if tier is CacheTier.DEVICE:
                held.device -= 1
                last = not held.device
            else:
                held.cpu -= 1
                last = not held.cpu
            if last and held.key is not None:
                group.unclaim(held.key, tier)
            if not (held.device or held.cpu):
                self._drop(group, name, held)

    def release(self) -> None:
        """Mutates: forget all; for an owner that is not used any more."""
        self._count(-self._blocks)
        self._groups.clear()
        self.awaited.clear()

    # --- parts ----------------------------------------------------------------------------------

    def _group(self, number: int | None) -> WindowGroup:
        group = self._groups.get(number)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                number = _NAMELESS
            group = self._groups.setdefault(number, self._new_group())
        return group

    def new_lane(self) -> Lane:
        return Lane()

    def _new_group(self) -> WindowGroup:
        return WindowGroup(self.new_lane(), self.new_lane(), self.new_lane())

    def _weigh(self) -> None:
        self._refusal = next((g.refusal for g in self._groups.values() if g.refusal), "")

    def _settle(self, group: WindowGroup, held: HeldBlock, key: BlockKey) -> None:
        held.key = key
        if held.device:
            group.claim(key, CacheTier.DEVICE)
        if held.cpu:
            group.claim(key, CacheTier.CPU)

    def _drop(self, group: WindowGroup, name: EngineBlockHash, held: HeldBlock) -> None:
        del group.held[name]
        self._count(-1)
        if held.key is None:
            self._stop_awaiting(name, group)

    def _stop_awaiting(self, name: EngineBlockHash, group: WindowGroup) -> None:
        groups = [other for other in self.awaited.pop(name) if other is not group]
        if groups:
            self.awaited[name] = groups

    def _trim_awaited(self) -> None:
        while len(self.awaited) > self._max_awaited:
            name, groups = self.awaited.popitem(last=False)
            for group in groups:
                del group.held[name]
            self._count(-len(groups))
            self.forgotten += len(groups)

    def _count(self, blocks: int) -> None:
        self._blocks += blocks
        self.account.charge(blocks * GROUP_RECORD_BYTES)

    # --- reading --------------------------------------------------------------------------------

    def usable(
        self, keys: Sequence[BlockKey], depths: tuple[int, int, int], block_size_tokens: int
    ) -> tuple[int, int, int]:
        """Depths (any tier, device, CPU) of the full-attention group -> what all groups can serve.

        `keys`: the prompt's, at least up to the deepest. Looks down from the full depth, where the
        window normally is.
        """
        groups = list(self._groups.values())
        needed = [group.needed_blocks(block_size_tokens) for group in groups]
        any_blocks, device_blocks, cpu_blocks = depths
        device = deepest(keys, device_blocks, [g.device for g in groups], needed)
        cpu = deepest(keys, cpu_blocks, [g.cpu for g in groups], needed)
        if any_blocks in (device, cpu):  # what one tier can serve, both can
            return any_blocks, device, cpu
        return deepest(keys, any_blocks, [g.any for g in groups], needed), device, cpu

    # --- dump and restore -----------------------------------------------------------------------

    def groups(self) -> Iterator[tuple[int | None, str, int, int, str, Iterator[_Record]]]:
        """Number, kind, window, block size and refusal of each group, and its blocks of known content
        (name, key, copies on the device and in CPU memory)."""
        for number, group in self._groups.items():
            records = ((n, h.key, h.device, h.cpu) for n, h in group.held.items() if h.key is not None)
            yield number, group.kind, group.window_tokens, group.block_size_tokens, group.refusal, records

    def put_group(
        self, number: int | None, kind: str, window_tokens: int, block_size_tokens: int, refusal: str
    ) -> bool:
        """Mutates: take over one of another's `groups`, without its blocks. False: there is one of that
        number, or it is none that `admit` could have left behind."""
        plain = number is not _NAMELESS and (
            kind in FULL_ATTENTION_KINDS
            or (kind in SLIDING_WINDOW_KINDS and 0 < window_tokens <= MAX_WINDOW_TOKENS)
        )
        if (
            number in self._groups
            or block_size_tokens < 0
            or (not plain if not refusal else refusal not in REFUSALS)
        ):
            return False
        group = self._groups[number] = self._new_group()
        group.kind, group.window_tokens = kind, window_tokens
        group.block_size_tokens, group.refusal = block_size_tokens, refusal
        self._weigh()
        return True

    def put(self, number: int | None, name: EngineBlockHash, key: BlockKey, device: int, cpu: int) -> bool:
        """Mutates: take over a block. False: there is no room for it."""
        group = self._groups[number]
        if self._blocks >= self._max_blocks or self.account.is_full:
            return False
        held = group.held[name] = HeldBlock(None, device, cpu)
        self._count(1)
        self._settle(group, held, key)
        return True

    def check_integrity(self) -> None:
        """Raises IndexCorrupt if the groups contradict themselves."""
        awaited: dict[EngineBlockHash, int] = {}
        for group in self._groups.values():
            device: dict[BlockKey, int] = {}
            cpu: dict[BlockKey, int] = {}
            for name, held in group.held.items():
                require(held.device > 0 or held.cpu > 0, "a group holds a block without copies")
                if held.key is None:
                    awaited[name] = awaited.get(name, 0) + 1
                    continue
                for lane, copies in ((device, held.device), (cpu, held.cpu)):
                    if copies:
                        lane[held.key] = lane.get(held.key, 0) + 1
            require((device, cpu) == (group.device.counts(), group.cpu.counts()), "claims of a group are off")
            both = {key: device.get(key, 0) + cpu.get(key, 0) for key in device.keys() | cpu.keys()}
            require(both == group.any.counts(), "claims of a group in any tier are off")
        require({n: len(g) for n, g in self.awaited.items()} == awaited, "awaited blocks are off")
        require(self._blocks == sum(len(g.held) for g in self._groups.values()), "group count is off")
