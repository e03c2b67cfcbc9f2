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
    windows: dict[int, int] = field(default_factory=dict)  # sliding-window groups seen: tokens of each
    group_copies: Counter[tuple[int, int, CacheTier]] = field(default_factory=Counter)

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

    def store_in_group(self, group: int, window_tokens: int, name: int, tier: CacheTier) -> None:
        self.windows[group] = window_tokens
        self.group_copies[group, name, tier] += 1

    def remove_from_group(self, group: int, name: int, tier: CacheTier) -> None:
        if self.group_copies[group, name, tier]:
            self.group_copies[group, name, tier] -= 1

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

    def group_claims(self, group: int) -> set[tuple[Root, Path, CacheTier]]:
        """What the names of a group's blocks mean is what the full group's events said."""
        names = [(n, tier) for (g, n, tier), count in self.group_copies.items() if g == group and count]
        held = [(self.content(name), tier) for name, tier in names]
        return {(content[0], content[1], tier) for content, tier in held if content is not None}

    def depths(self, root: Root, tokens: list[int]) -> Depths:
        size = self.block_size_tokens
        if not size:
            return Depths()
        claims = self.claims()
        windows = [(self.group_claims(group), tokens_) for group, tokens_ in self.windows.items()]
        blocks = [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

        def held(
            block: int, claimed: set[tuple[Root, Path, CacheTier]], tiers: tuple[CacheTier, ...]
        ) -> bool:
            path = tuple(blocks[: block + 1])
            return any((root, path, tier) in claimed for tier in tiers)

        def depth(tiers: tuple[CacheTier, ...]) -> int:
            fits = [0]
            for count in range(1, len(blocks) + 1):
                if not held(count - 1, claims, tiers):
                    break
                if all(
                    held(block, in_group, tiers)
                    for in_group, window_tokens in windows
                    for block in range(count)
                    if (block + 1) * size > count * size - (window_tokens - 1)
                ):
                    fits.append(count)
            return fits[-1]

        return Depths(depth(TIERS), depth((CacheTier.DEVICE,)), depth((CacheTier.CPU,)))
