"""A what-if as one HTML file that opens offline, and as JSON. Plots are inline SVG; no script, no link."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from simulator.summary import Estimate
from simulator.svg import bar_chart, line_chart
from simulator.what_if import AS_CONFIGURED, NO_PULLS, Arm, Verdict, quantiles

_COLUMNS = (
    ("ttft_mean_s", "TTFT mean, s", 3),
    ("ttft_p50_s", "TTFT p50, s", 3),
    ("ttft_p99_s", "TTFT p99, s", 2),
    ("latency_p50_s", "latency p50, s", 2),
    ("rate_per_s", "requests/s", 2),
    ("failed", "failed", 0),
    ("computed_share", "prompt computed", 3),
    ("pulled_share", "prompt pulled", 3),
    ("pulled_gib", "moved, GiB", 1),
    ("busiest_share", "busiest / mean", 2),
)
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#1a202c}"
    "table{border-collapse:collapse;font-size:13px}"
    "td,th{border:1px solid #cbd5e0;padding:3px 8px;text-align:right}"
    "td:first-child,th:first-child{text-align:left}.answer{background:#ebf8ff;padding:1em;border-radius:6px}"
    "svg{max-width:100%;height:auto;margin:1em 0}"
)


def as_json(arms: Sequence[Arm], found: Verdict, inputs: Mapping[str, Any]) -> str:
    """Everything on the page, with the same numbers; sorted, so that equal runs give equal bytes."""
    body = {
        "inputs": dict(inputs),
        "verdict": asdict(found),
        "arms": {
            arm.name: {
                "figures": {n: _estimate(e) for n, e in arm.figures.items()},
                "ttft_quantiles_s": dict(zip(map(str, quantiles()), arm.first.ttft_quantiles_s, strict=True)),
                "requests_by_endpoint": dict(arm.first.served),
                "source_reasons": dict(arm.first.reasons),
            }
            for arm in arms
        },
    }
    return json.dumps(_finite(body), indent=1, sort_keys=True) + "\n"


def _estimate(estimate: Estimate) -> dict[str, float]:
    return {"mean": estimate.mean, "half_width_95": estimate.half_width, "seeds": estimate.seeds}


def _finite(value: Any) -> Any:
    """NaN is no JSON."""
    if isinstance(value, float):
        return round(value, 9) if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def as_html(arms: Sequence[Arm], found: Verdict, inputs: Mapping[str, Any]) -> str:
    """The page."""
    shown = _shown(arms, found)
    cumulative = {
        arm.name: [(s, q / 100) for s, q in zip(arm.first.ttft_quantiles_s, quantiles(), strict=True)]
        for arm in shown
    }
    parts = [
        "<h1>Would pulls pay here?</h1>",
        f'<p class="answer">{html.escape(found.sentence)}</p>',
        "<p>Simulated: the picker is the product's own, the engines are modelled. Differences below about 10%"
        " are less than the model can tell; intervals are 95% over seeds.</p>",
        "<h2>Arms</h2>",
        _table(arms),
        "<h2>Time to the first token</h2>",
        line_chart("Share of requests answered within", "seconds", "share of requests", cumulative, True),
        _bars("Time to the first token, p50", "seconds", arms, "ttft_p50_s"),
        _bars("Time to the first token, p99", "seconds", arms, "ttft_p99_s"),
        "<h2>Work</h2>",
        _bars("Share of prompt tokens computed", "share", arms, "computed_share"),
        _served(shown),
        "<h2>Why a source was named, or not</h2>",
        _reasons(shown),
        "<h2>Inputs</h2>",
        "<table>"
        + "".join(
            f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>"
            for name, value in inputs.items()
        )
        + "</table>",
    ]
    head = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kvpull simulate</title><style>{_STYLE}'
    )
    return head + "</style><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _shown(arms: Sequence[Arm], found: Verdict) -> list[Arm]:
    wanted = {AS_CONFIGURED, NO_PULLS, found.best}
    return [arm for arm in arms if arm.name in wanted]


def _table(arms: Sequence[Arm]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for _, title, _ in _COLUMNS)
    rows = []
    for arm in arms:
        cells = "".join(f"<td>{_cell(arm.figures[name], digits)}</td>" for name, _, digits in _COLUMNS)
        rows.append(f"<tr><td>{html.escape(arm.name)}</td>{cells}</tr>")
    return f"<table><tr><th>arm</th>{head}</tr>{''.join(rows)}</table>"


def _cell(estimate: Estimate, digits: int) -> str:
    spread = f" &plusmn;{estimate.half_width:.{digits}f}" if estimate.half_width else ""
    return f"{estimate.mean:.{digits}f}{spread}"


def _bars(title: str, unit: str, arms: Sequence[Arm], figure: str) -> str:
    values = [(arm.figures[figure].mean, arm.figures[figure].half_width) for arm in arms]
    names = [arm.name.removeprefix("threshold ") for arm in arms]
    return bar_chart(title, unit, names, {figure: values})


def _served(arms: Sequence[Arm]) -> str:
    endpoints = sorted({endpoint for arm in arms for endpoint in arm.first.served if endpoint})
    if len(endpoints) > 32:
        return f"<p>{len(endpoints)} endpoints: see the JSON for each.</p>"
    bars = {arm.name: [(float(arm.first.served.get(e, 0)), 0.0) for e in endpoints] for arm in arms}
    names = [endpoint.rpartition("-")[2].lstrip("0") or "0" for endpoint in endpoints]
    return bar_chart("Requests computed by each endpoint (first seed)", "requests", names, bars)


def _reasons(arms: Sequence[Arm]) -> str:
    reasons = sorted({reason for arm in arms for reason in arm.first.reasons})
    head = "".join(f"<th>{html.escape(reason or 'not routed')}</th>" for reason in reasons)
    rows = [
        f"<tr><td>{html.escape(arm.name)}</td>"
        + "".join(f"<td>{arm.first.reasons.get(reason, 0)}</td>" for reason in reasons)
        + "</tr>"
        for arm in arms
    ]
    return f"<table><tr><th>arm</th>{head}</tr>{''.join(rows)}</table>"
