"""`make bench NAME=index_growth`: how a look-up grows with prompt length and with endpoints.

Token list to depths at every endpoint: 1K, 2K, 4K and 8K blocks of 16 tokens on 16, 64, 256 and 1,024
endpoints, each holding a share of the prompt (endpoint i the i-th), with 400K block replicas of a fleet
behind them. Best of the repeats. `--plot FILE` draws it. Last line: JSON with the growth factors.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from benchmarks.index import best_us, new_index
from benchmarks.index_workload import BLOCK_TOKENS, FLEET, Store, endpoint, fleet
from epp.core.events import BlockStored
from epp.core.index_choice import COMPILED, IndexMaker, available_indexes
from epp.core.prefix_index import PrefixQuery
from epp.core.types import CacheTier, EngineBlockHash

BLOCKS = (1_024, 2_048, 4_096, 8_192)
ENDPOINTS = (16, 64, 256, 1_024)
BACKGROUND = 400_000
Figures = dict[tuple[int, int], float]  # (blocks, endpoints) -> us


def look_ups_us(make: IndexMaker, endpoints: int, background: Iterable[Store]) -> dict[int, float]:
    """One look-up for each prompt length, in us."""
    rng = random.Random(1)
    tokens = [rng.randrange(152_000) for _ in range(BLOCKS[-1] * BLOCK_TOKENS)]
    hashes = tuple(EngineBlockHash(i + 1) for i in range(BLOCKS[-1]))
    index = new_index(make, max(endpoints, FLEET))
    for owner, event in background:
        index.apply(owner, [event])
    asked = [endpoint(n) for n in range(endpoints)]
    for number, owner in enumerate(asked):
        depth = max(8, BLOCKS[-1] * (number + 1) // endpoints)
        for tier in (CacheTier.DEVICE, CacheTier.CPU):
            held = tokens[: depth * BLOCK_TOKENS]
            index.apply(
                owner, [BlockStored(tier, hashes[:depth], None, held, BLOCK_TOKENS, has_extra_keys=True)]
            )
    figures = {}
    for blocks in BLOCKS:
        query = PrefixQuery(tokens[: blocks * BLOCK_TOKENS])
        assert index.depths(query, asked)[asked[-1]].blocks == blocks
        figures[blocks] = best_us(lambda query=query: index.depths(query, asked))  # type: ignore[misc]
    return figures


def measure(make: IndexMaker, background: list[Store]) -> Figures:
    return {
        (blocks, endpoints): us
        for endpoints in ENDPOINTS
        for blocks, us in look_ups_us(make, endpoints, background).items()
    }


def print_table(name: str, figures: Figures) -> None:
    print(f"{name}, us a look-up")
    print(f"{'blocks':>8}" + "".join(f"{n:>7} endpoints" for n in ENDPOINTS))
    for blocks in BLOCKS:
        print(f"{blocks:>8}" + "".join(f"{figures[blocks, n]:>17,.0f}" for n in ENDPOINTS))


def plot(path: Path, figures: dict[str, Figures]) -> None:
    """Two panels: over blocks (a line an endpoint count) and over endpoints (a line a length)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for name, own in figures.items():
        style = "-" if name == COMPILED else "--"
        for shade, endpoints in enumerate(ENDPOINTS):
            line = [own[blocks, endpoints] for blocks in BLOCKS]
            left.plot(
                BLOCKS, line, style, marker="o", color=f"C{shade}", label=f"{name}, {endpoints} endpoints"
            )
        for shade, blocks in enumerate(BLOCKS):
            line = [own[blocks, endpoints] for endpoints in ENDPOINTS]
            right.plot(
                ENDPOINTS, line, style, marker="o", color=f"C{shade}", label=f"{name}, {blocks} blocks"
            )
    for axes, what in ((left, "blocks of the prompt"), (right, "endpoints")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(what)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=7)
    left.set_ylabel("us a look-up (tokens to depths)")
    canvas.tight_layout()
    canvas.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    background = list(fleet(BACKGROUND))
    figures = {name: measure(make, background) for name, make in available_indexes().items()}
    result: dict[str, float] = {}
    for name, own in figures.items():
        print_table(name, own)
        result[f"x8_blocks_{name}"] = own[8_192, 64] / own[1_024, 64]
        result[f"x64_endpoints_{name}"] = own[8_192, 1_024] / own[8_192, 16]
        result[f"us_8192x1024_{name}"] = own[8_192, 1_024]
    if args.plot:
        plot(args.plot, figures)
    print(json.dumps({key: round(value, 2) for key, value in result.items()}))


if __name__ == "__main__":
    main()
