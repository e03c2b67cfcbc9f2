"""The tables of docs/simulation.md from committed inputs: Markdown, plots and JSON, by one command.

Every row says whether it was fitted or predicted. Nothing is rounded towards a published figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulator.calibration import CalibratedModel, load_model, model_names
from simulator.crossover import CrossoverRow, crossover_table, decode_table
from simulator.experiment import (
    NEWCOMER,
    Experiment,
    Figures,
    Ratio,
    experiment_names,
    load_experiment,
)
from simulator.kept_results import KeptResults
from simulator.runner import Job, Result, jobs_of, progress_bar, run_jobs
from simulator.summary import Estimate
from simulator.svg import bar_chart, line_chart

TARGET = 0.20  # of a published ratio
Measured = dict[tuple[str, str, str], Estimate]  # arm, stage, figure
_CROSSOVER_HEAD = (
    "| prefix tokens | recompute ms, published | simulated | error | pull ms, published | simulated | error |"
)
_ALWAYS = ("ttft_p50_s", "ttft_p99_s", "latency_p50_s", "rate_per_s", "failed", "pulled_gib", "busiest_share")


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One published ratio beside the simulated one."""

    ratio: Ratio
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= TARGET


def measure(results: Iterable[Result]) -> Measured:
    """Over seeds. Results of variants are left out."""
    return _over_seeds(result for result in results if not result.job.variant)


def _over_seeds(results: Iterable[Result]) -> Measured:
    found: dict[tuple[str, str, str], list[float]] = {}
    for result in results:
        for stage, figures in result.figures.items():
            for name, value in figures.items():
                found.setdefault((result.job.arm, stage, name), []).append(value)
    return {key: Estimate.of(values) for key, values in found.items()}


def ratio_rows(spec: Experiment, measured: Measured) -> list[RatioRow]:
    """Where both arms were published and simulated."""
    published = {(p.arm, p.stage, p.figure): p.value for p in spec.published}
    rows = []
    for ratio in spec.ratios:
        of, over = (ratio.of, ratio.stage, ratio.figure), (ratio.over, ratio.stage, ratio.figure)
        if of in measured and over in measured and published.get(over) and measured[over].mean:
            simulated = measured[of].mean / measured[over].mean
            rows.append(RatioRow(ratio, published[of] / published[over], simulated))
    return rows


def write_tables(
    out: Path,
    *,
    only: Sequence[str],
    seeds: int | None,
    processes: int,
    variants: bool,
    kept: KeptResults | None = None,
    run: bool = True,
) -> list[Path]:
    """Run what is asked for and not kept from before (not `run`: only show what is kept); the files."""
    out.mkdir(parents=True, exist_ok=True)
    written = [] if only else _write_crossovers(out)
    names = list(only) or experiment_names()
    specs = {name: load_experiment(name) for name in names}
    jobs: list[Job] = []
    for name, spec in specs.items():
        jobs += jobs_of(name, spec, seeds=seeds, variants=variants)
    todo = [] if not run else jobs if kept is None else kept.missing(jobs)
    with progress_bar("simulations", len(todo)) as advance:

        def ended(result: Result) -> None:
            if kept is not None:
                kept.add(result)
            advance()

        results = run_jobs(todo, processes, ended)
    if kept is not None:
        results = kept.results(jobs)
    for name, spec in specs.items():
        written += _write_experiment(out, name, spec, [r for r in results if r.job.experiment == name])
    return written


# --- crossover ----------------------------------------------------------------------------------------
def crossovers() -> dict[str, list[CrossoverRow]]:
    models = {name: load_model(name) for name in model_names()}
    return {name: crossover_table(model) for name, model in models.items() if model.points}


def _write_crossovers(out: Path) -> list[Path]:
    lines = ["# Crossover and decode (fitted: these tables are what the models were calibrated with)", ""]
    plots = []
    for name, rows in crossovers().items():
        model = load_model(name)
        lines += [f"## {name}", "", f"Source: {model.source}.", ""]
        lines += [_CROSSOVER_HEAD]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [
            f"| {r.prefix_tokens:,} | {r.published_recompute_ms:,.0f} | {r.simulated_recompute_ms:,.0f} "
            f"| {r.recompute_error:+.1%} | {r.published_pull_ms:,.0f} | {r.simulated_pull_ms:,.0f} "
            f"| {r.pull_error:+.1%} |"
            for r in rows
        ]
        lines += _decode_lines(model)
        lines += ["", "| parameter | value | origin | source |", "|---|---|---|---|"]
        lines += [f"| {v.name} | {v.value:.5g} | {v.origin} | {v.source} |" for v in model.values]
        lines += [""]
        series = {
            "recompute, published": [(float(r.prefix_tokens), r.published_recompute_ms) for r in rows],
            "recompute, simulated": [(float(r.prefix_tokens), r.simulated_recompute_ms) for r in rows],
            "pull, published": [(float(r.prefix_tokens), r.published_pull_ms) for r in rows],
            "pull, simulated": [(float(r.prefix_tokens), r.simulated_pull_ms) for r in rows],
        }
        path = out / f"crossover-{name}.svg"
        path.write_text(
            line_chart(f"{name}: pull against recompute", "prefix tokens", "ms", series, log_x=False)
        )
        plots.append(path)
    page = out / "crossover.md"
    page.write_text("\n".join(lines))
    return [page, *plots]


def _decode_lines(model: CalibratedModel) -> list[str]:
    rows = decode_table(model)
    if not rows:
        return []
    lines = ["", f"Decode, source: {model.decode_source}.", ""]
    lines += [
        "| streams | context, tokens | ms a token, published | fit | error | with the published stack |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    return lines + [
        f"| {r.streams} | {r.context_tokens:,} | {r.published_ms:.2f} | {r.alone_ms:.2f} | {r.error:+.0%} "
        f"| {r.simulated_ms:.2f} |"
        for r in rows
    ]


# --- fleets -------------------------------------------------------------------------------------------
def _write_experiment(out: Path, name: str, spec: Experiment, results: Sequence[Result]) -> list[Path]:
    measured = measure(results)
    lines = [f"# {spec.title}", "", f"Source: {spec.source}.", "", f"Protocol: {spec.protocol}", ""]
    lines += ["Predicted: no figure of this table was used in a fit, but where a row says so.", ""]
    lines += _published_rows(spec, measured) + _ratio_lines(ratio_rows(spec, measured))
    lines += _arm_lines(spec, measured) + _variant_lines(spec, results)
    page, data, plot = out / f"{name}.md", out / f"{name}.json", out / f"{name}.svg"
    page.write_text("\n".join(lines) + "\n")
    data.write_text(_json(results))
    plot.write_text(_plot(spec, measured))
    return [page, data, plot]


def _published_rows(spec: Experiment, measured: Measured) -> list[str]:
    if not spec.published:
        return []
    lines = [
        "| stage | arm | figure | published | simulated | error | origin |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in spec.published:
        found = measured.get((row.arm, row.stage, row.figure))
        if found is not None:
            error = f"{found.mean / row.value - 1:+.0%}" if row.value else "-"
            origin = f"used for the {row.used_for}" if row.used_for else "predicted"
            lines.append(
                f"| {row.stage} | {row.arm} | {row.figure} | {row.value:g} | {_shown(found)} | {error} "
                f"| {origin} |"
            )
    return [*lines, ""]


def _ratio_lines(rows: Sequence[RatioRow]) -> list[str]:
    if not rows:
        return []
    lines = [
        "| ratio | stage | published | simulated | error | within 20% | required |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        r = row.ratio
        lines.append(
            f"| {r.figure}: {r.of} / {r.over} | {r.stage} | {row.published:.3f} | {row.simulated:.3f} "
            f"| {row.error:+.0%} | {'yes' if row.within else '**no**'} | {'yes' if r.required else ''} |"
        )
    return [*lines, ""]


def _arm_lines(spec: Experiment, measured: Measured) -> list[str]:
    lines = [f"| stage | arm | seeds | {' | '.join(_ALWAYS)} |", "|---|---|---|" + "---|" * len(_ALWAYS)]
    stages = list(dict.fromkeys(stage for _, stage, _ in measured))
    for stage in stages:
        for arm in spec.arms:
            if (arm, stage, _ALWAYS[0]) in measured:
                cells = " | ".join(_shown(measured[arm, stage, figure]) for figure in _ALWAYS)
                seeds = measured[arm, stage, _ALWAYS[0]].seeds
                lines.append(f"| {stage} | {arm} | {seeds} | {cells} |")
    note = f"Means over seeds with 95% intervals (the protocol wants {spec.seeds})."
    return [*lines, "", note, "", *_newcomer_lines(spec, measured)]


def _newcomer_lines(spec: Experiment, measured: Measured, assumption: str = "") -> list[str]:
    """How cold engines fared that joined."""
    figures = list(dict.fromkeys(f for _, s, f in measured if s == NEWCOMER and f.startswith("join_")))
    if not figures:
        return []
    title = f"newcomer, arm ({assumption})" if assumption else "newcomer, arm"
    lines = [f"| {title} | {' | '.join(figures)} |", "|---|" + "---|" * len(figures)]
    for arm in spec.arms:
        if (arm, NEWCOMER, figures[0]) in measured:
            cells = " | ".join(_shown(measured[arm, NEWCOMER, figure]) for figure in figures)
            lines.append(f"| {arm} | {cells} |")
    return [*lines, ""]


def _variant_lines(spec: Experiment, results: Sequence[Result]) -> list[str]:
    """How each ratio moves when one assumption is another; the base under the same seeds beside it."""
    changed = [r for r in results if r.job.variant]
    if not changed:
        return []
    if not spec.ratios:
        return _variant_figures(spec, changed)
    last = max(r.job.seed for r in changed)
    base = [r for r in results if not r.job.variant and r.job.seed <= last]
    lines = [f"## Sensitivity of the ratios to what is assumed (first seeds, {last} at most)", ""]
    names = [f"{r.figure} {r.of}/{r.over} @{r.stage}" for r in spec.ratios]
    lines += [f"| assumption | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for title, chosen in [
        ("as committed", base),
        *((v, [r for r in changed if r.job.variant == v]) for v in spec.variants),
    ]:
        if chosen:
            lines.append(f"| {title} | {' | '.join(_ratio_cell(ratio, chosen) for ratio in spec.ratios)} |")
    return [*lines, "", "Means of the seeds' own ratios with 95% intervals.", ""]


def _variant_figures(spec: Experiment, changed: Sequence[Result]) -> list[str]:
    """Where nothing was published: the figures themselves."""
    last = max(r.job.seed for r in changed)
    lines = [f"## Under other assumptions (first seeds, {last} at most)", ""]
    lines += [
        f"| assumption | stage | arm | {' | '.join(_ALWAYS)} |",
        "|---|---|---|" + "---|" * len(_ALWAYS),
    ]
    newcomers: list[str] = []
    for variant in spec.variants:
        found = _over_seeds([r for r in changed if r.job.variant == variant])
        newcomers += _newcomer_lines(spec, found, variant)
        stages = [s for s in dict.fromkeys(stage for _, stage, _ in found) if s != NEWCOMER]
        for stage in stages:
            for arm in spec.arms:
                if (arm, stage, _ALWAYS[0]) in found:
                    cells = " | ".join(_shown(found[arm, stage, figure]) for figure in _ALWAYS)
                    lines.append(f"| {variant} | {stage} | {arm} | {cells} |")
    return [*lines, "", *newcomers]


def _ratio_cell(ratio: Ratio, chosen: Sequence[Result]) -> str:
    """Of the seeds under which both arms ran."""
    by_seed: dict[int, dict[str, Figures]] = {}
    for result in chosen:
        by_seed.setdefault(result.job.seed, {})[result.job.arm] = result.figures
    values = []
    for arms in by_seed.values():
        if ratio.of in arms and ratio.over in arms and arms[ratio.over][ratio.stage][ratio.figure]:
            over = arms[ratio.over][ratio.stage][ratio.figure]
            values.append(arms[ratio.of][ratio.stage][ratio.figure] / over)
    return _shown(Estimate.of(values)) if values else "-"


def _shown(estimate: Estimate) -> str:
    size = abs(estimate.mean)
    if math.isnan(size):
        return "-"
    digits = 0 if size >= 100 or estimate.mean == round(estimate.mean) else 1 if size >= 10 else 3
    spread = f" ±{estimate.half_width:.{digits}f}" if estimate.half_width else ""
    return f"{estimate.mean:.{digits}f}{spread}"


def _json(results: Sequence[Result]) -> str:
    rows = [
        {
            "arm": r.job.arm,
            "seed": r.job.seed,
            "variant": r.job.variant,
            "figures": {
                stage: {n: round(v, 9) if v == v else None for n, v in figures.items()}
                for stage, figures in r.figures.items()
            },
        }
        for r in results
    ]
    return json.dumps(rows, indent=1, sort_keys=True) + "\n"


def _plot(spec: Experiment, measured: Measured) -> str:
    figure = spec.ratios[0].figure if spec.ratios else "ttft_p50_s"
    stages = [s for s in dict.fromkeys(stage for _, stage, _ in measured) if s != NEWCOMER]
    bars = {
        arm: [
            (e.mean, e.half_width) if (e := measured.get((arm, stage, figure))) else (float("nan"), 0.0)
            for stage in stages
        ]
        for arm in spec.arms
    }
    return bar_chart(spec.title, figure, stages, bars)
