"""The index as one would write it without any thought of speed: the yardstick of the real one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from epp.core.prefix_index import Depths
from epp.core.types import CacheTier

Root = tuple[str | None, str | None]  # LoRA name, cache salt
Path = tuple[tuple[int, ...], ...]  # blocks from block 0 on
TIERS = (CacheTier.DEVICE, CacheTier.CPU)


@dataclass
class NaiveEndpoint:
    """Unlimited memory: everything said since the last clear is kept."""

    block_size_tokens: int = 0
    said: dict[int, tuple[int | None, Root, tuple[int, ...]]] = field(default_factory=dict)
    copies: Counter[tuple[int, CacheTier]] = field(default_factory=Counter)

    def store(
        self, name: int, parent: int | None, root: Root, block: tuple[int, ...], tier: CacheTier
    ) -> None:
        self.said.setdefault(name, (parent, root, block))
        self.copies[name, tier] += 1

    def store_by_name(self, name: int, tier: CacheTier) -> None:
        self.copies[name, tier] += 1

    def remove(self, name: int, tier: CacheTier) -> None:
        if self.copies[name, tier]:
            self.copies[name, tier] -= 1

    def content(self, name: int) -> tuple[Root, Path] | None:
        blocks: list[tuple[int, ...]] = []
        at: int | None = name
        while at is not None:
            if at not in self.said:
                return None
            at, root, block = self.said[at]
            blocks.append(block)
        return root, tuple(reversed(blocks))

    def claims(self) -> set[tuple[Root, Path, CacheTier]]:
        held = [(self.content(name), tier) for (name, tier), count in self.copies.items() if count]
        return {(content[0], content[1], tier) for content, tier in held if content is not None}

    def depths(self, root: Root, tokens: list[int]) -> Depths:
        size = self.block_size_tokens
        if not size:
            return Depths()
        claims = self.claims()
        blocks = [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

        def depth(tiers: tuple[CacheTier, ...]) -> int:
            for count in range(len(blocks)):
                path = tuple(blocks[: count + 1])
                if not any((root, path, tier) in claims for tier in tiers):
                    return count
            return len(blocks)

        return Depths(depth(TIERS), depth((CacheTier.DEVICE,)), depth((CacheTier.CPU,)))
