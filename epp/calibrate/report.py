"""What a calibration says: text, JSON, a PullThresholds document, its ConfigMap, and a picture.

The document carries the curves, too: cost mode starts from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epp.calibrate.fit import PULL, RECOMPUTE, Calibration
from epp.calibrate.measure import Measured

_KEY = "thresholds.yaml"


@dataclass(frozen=True, slots=True)
class Scope:
    """What the threshold shall apply to; nothing: everything."""

    model: str | None = None
    source_class: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A calibration that was accepted."""

    measured: Measured
    found: Calibration
    threshold_tokens: int
    scope: Scope = Scope()


def document(report: Report) -> str:
    """The PullThresholds document."""
    settings = _settings(report)
    scope = report.scope
    lines = [
        f"# kvpull calibrate: {crossover_text(report.found)}",
        "apiVersion: kvpull/v1alpha1",
        "kind: PullThresholds",
        "spec:",
    ]
    if scope == Scope():
        return "\n".join([*lines, "  default:", *(f"    {line}" for line in settings)]) + "\n"
    lines += ["  overrides:", "  - match:"]
    lines += [
        f"      {name}: {_quoted(value)}"
        for name, value in (("model", scope.model), ("sourceClass", scope.source_class))
        if value is not None
    ]
    return "\n".join([*lines, "    set:", *(f"      {line}" for line in settings)]) + "\n"


def _settings(report: Report) -> list[str]:
    recompute, pull, measured = report.found.recompute, report.found.pull, report.measured
    size = f", bytesPerToken: {measured.bytes_per_token:.6g}" if measured.bytes_per_token else ""
    return [
        "enabled: true",
        f"minCachedTokenDelta: {report.threshold_tokens}",
        "cost:",
        f"  recompute: {{fixedMs: {recompute.fixed_ms:.6g}, tokenUs: {recompute.token_us:.6g},"
        f" tokenPairNs: {recompute.token_pair_ns:.6g}}}",
        f"  pull: {{floorMs: {pull.floor_ms:.6g}, tokenUs: {pull.token_us:.6g}{size}}}",
    ]


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def config_map(report: Report, name: str, namespace: str | None) -> str:
    """A ConfigMap around the document, for kubectl apply."""
    place = f"\n  namespace: {namespace}" if namespace else ""
    body = "".join(f"    {line}\n" for line in document(report).splitlines())
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}{place}\ndata:\n  {_KEY}: |\n{body}"


def crossover_text(found: Calibration) -> str:
    """One line."""
    if found.extrapolated:
        return f"a pull was cheaper at every length measured, from {found.shortest_tokens:,} tokens on"
    return (
        f"a pull is cheaper from {found.crossover_tokens:,.0f} tokens on"
        f" (95 %: {found.low_tokens:,.0f} to {found.high_tokens:,.0f})"
    )


def text(report: Report) -> list[str]:
    """The table and the result, for people."""
    samples, found = report.measured.samples, report.found
    lines = [f"{'tokens':>8} {'recompute ms':>13} {'pull ms':>9} {'change':>7}   fitted"]
    for tokens in sorted(samples[RECOMPUTE]):
        ours, theirs = (statistics.median(samples[leg][tokens]) for leg in (RECOMPUTE, PULL))
        fitted = f"{found.recompute.at_ms(tokens):.0f} / {found.pull.at_ms(tokens):.0f}"
        lines.append(f"{tokens:>8,} {ours:>13.1f} {theirs:>9.1f} {theirs / ours - 1:>+7.0%}   {fitted}")
    lines += [
        f"recompute: {found.recompute.fixed_ms:.1f} ms + {found.recompute.token_us:.2f} us a token"
        f" + {found.recompute.token_pair_ns:.3f} ns a token squared",
        f"pull: {found.pull.floor_ms:.1f} ms + {found.pull.token_us:.2f} us a token",
        _evidence(report.measured),
        crossover_text(found),
        f"minCachedTokenDelta: {report.threshold_tokens}",
    ]
    return lines + [f"not counted: {line}" for line in report.measured.discarded]


def _evidence(measured: Measured) -> str:
    controls = f"{measured.control_legs} control runs moved nothing"
    if not measured.verified:
        return f"bytes NOT verified (the engines do not count them); {controls}"
    return (
        f"{measured.moved_bytes:,} bytes pulled, counted alike at both ends"
        f" ({measured.bytes_per_token or 0.0:,.0f} a token); {controls}"
    )


def as_json(report: Report) -> Mapping[str, Any]:
    """Everything, samples included."""
    found = report.found
    return {
        "min_cached_token_delta": report.threshold_tokens,
        "crossover_tokens": found.crossover_tokens,
        "crossover_low_tokens": found.low_tokens,
        "crossover_high_tokens": found.high_tokens,
        "extrapolated": found.extrapolated,
        "recompute": {name: getattr(found.recompute, name) for name in found.recompute.__slots__},
        "pull": {name: getattr(found.pull, name) for name in ("floor_ms", "token_us")},
        "bytes_per_token": report.measured.bytes_per_token,
        "moved_bytes": report.measured.moved_bytes,
        "bytes_verified": report.measured.verified,
        "control_legs": report.measured.control_legs,
        "discarded": report.measured.discarded,
        "samples_ms": report.measured.samples,
    }


def plot(report: Report, path: Path) -> None:
    """Samples, curves and crossover as a PNG. Raises ModuleNotFoundError without the `plots` extra."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, samples = report.found, report.measured.samples
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    grid = [found.longest_tokens * step / 200 for step in range(201)]
    for leg, curve, colour in ((RECOMPUTE, found.recompute, "tab:red"), (PULL, found.pull, "tab:blue")):
        points = [(tokens, ms) for tokens, values in sorted(samples[leg].items()) for ms in values]
        axes.plot(*zip(*points, strict=True), ".", color=colour, alpha=0.5, label=leg)
        axes.plot(grid, [curve.at_ms(tokens) for tokens in grid], color=colour)
    axes.axvspan(found.low_tokens, found.high_tokens, color="tab:green", alpha=0.2, label="crossover, 95 %")
    axes.axvline(report.threshold_tokens, color="black", linestyle="--", label="minCachedTokenDelta")
    axes.set_xlabel("tokens of the prefix")
    axes.set_ylabel("ms to the first token")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(crossover_text(found))
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
