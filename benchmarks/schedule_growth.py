"""`make bench NAME=schedule_growth`: how one decision grows with endpoints and with the length of the prompt.

`EndpointPicker.schedule` as in `benchmarks.schedule`, best of the repeats. `--plot FILE` draws it. Last line:
JSON with the growth factors.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

from benchmarks.schedule import BLOCK_TOKENS, build, cpu_us

ENDPOINTS = (16, 64, 256, 1_024)
TOKENS = (1_024, 4_096, 16_384, 65_536)
REPEATS = 15

Figures = dict[tuple[int, int], float]  # (endpoints, tokens) -> us


def measure() -> Figures:
    """Best CPU time of a decision in us, of every pool with every prompt."""
    found: Figures = {}
    for endpoints in ENDPOINTS:
        for tokens in TOKENS:
            picker, request = build(endpoints, blocks=tokens // BLOCK_TOKENS)

            def schedule(n: int) -> None:
                picker.schedule(request, 0.0, f"d{n}")  # noqa: B023  # called before the next turn
                picker.release(f"d{n}")  # noqa: B023

            (samples,) = cpu_us(schedule, repeats=REPEATS)
            found[endpoints, tokens] = min(samples)
    return found


def plot(path: Path, figures: Figures) -> None:
    """Two panels: over endpoints (a line a length) and over tokens (a line a pool)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvpull"
    from matplotlib import pyplot

    canvas, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for tokens in TOKENS:
        line = [figures[endpoints, tokens] / 1e3 for endpoints in ENDPOINTS]
        left.plot(ENDPOINTS, line, marker="o", label=f"{tokens:,} tokens")
    for endpoints in ENDPOINTS:
        line = [figures[endpoints, tokens] / 1e3 for tokens in TOKENS]
        right.plot(TOKENS, line, marker="o", label=f"{endpoints:,} endpoints")
    for axes, what in ((left, "endpoints"), (right, "tokens of the prompt")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(what)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    left.set_ylabel("one decision, ms of CPU")
    canvas.tight_layout()
    canvas.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    gc.disable()
    figures = measure()
    print("us of CPU a decision")
    print(f"{'tokens':>8}" + "".join(f"{n:>7,} endpoints" for n in ENDPOINTS))
    for tokens in TOKENS:
        print(f"{tokens:>8,}" + "".join(f"{figures[n, tokens]:>17,.0f}" for n in ENDPOINTS))
    if arguments.plot:
        plot(arguments.plot, figures)
    longest, largest = TOKENS[-1], ENDPOINTS[-1]
    growth = {
        "x64_endpoints": figures[largest, 16_384] / figures[ENDPOINTS[0], 16_384],
        "x64_tokens": figures[64, longest] / figures[64, TOKENS[0]],
        "us_1024_65536": figures[largest, longest],
    }
    print(json.dumps({name: round(value, 2) for name, value in growth.items()}))


if __name__ == "__main__":
    main()
