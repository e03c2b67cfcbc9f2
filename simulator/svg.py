"""Two kinds of plots as SVG text: lines over a numeric axis, and grouped bars. No library, script or font."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 74
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#718096", "#d69e2e", "#319795")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    begin: float  # pixels
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        place = math.log10(max(value, self.low)) if self.log else value
        return self.begin + (place - low) / ((high - low) or 1.0) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            return [10.0**n for n in range(first, last + 1) if self.low <= 10.0**n <= self.high]
        span = self.high - self.low or 1.0
        step = 10.0 ** math.floor(math.log10(span / 4))
        step *= next(n for n in (1, 2, 5, 10) if span / (step * n) <= 6)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Points], log_x: bool) -> str:
    """Lines by name. Values that are not finite, and with `log_x` those not above 0, are left out."""
    kept = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]
        for name, points in series.items()
    }
    every = [point for points in kept.values() for point in points] or [(1.0, 0.0)]
    xs, ys = [x for x, _ in every], [y for _, y in every]
    across = _Axis(min(xs), max(max(xs), min(xs) * 1.01), _LEFT, WIDTH - _RIGHT, log_x)
    up = _Axis(0.0, max(ys) or 1.0, HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(title, x_label, y_label, up)]
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{HEIGHT - _BOTTOM}" stroke="#e2e8f0"/>'
        )
        parts.append(_text(x, HEIGHT - _BOTTOM + 14, f"{tick:g}", "middle"))
    for number, (_name, points) in enumerate(kept.items()):
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts.append(_legend(list(kept)))
    return _svg(parts)


def bar_chart(
    title: str, y_label: str, groups: Sequence[str], series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """For each group one bar a series, as (value, half width of its interval)."""
    tops = [value + half for bars in series.values() for value, half in bars if math.isfinite(value + half)]
    up = _Axis(0.0, max(tops, default=1.0) or 1.0, HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(title, "", y_label, up)]
    room = (WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    width = room * 0.8 / max(1, len(series))
    for place, group in enumerate(groups):
        parts.append(_text(_LEFT + room * (place + 0.5), HEIGHT - _BOTTOM + 14, group, "middle"))
        for number, bars in enumerate(series.values()):
            value, half = bars[place]
            if not math.isfinite(value):
                continue
            x, y = _LEFT + room * (place + 0.1) + width * number, up.at(value)
            colour = COLOURS[number % len(COLOURS)]
            size = f'width="{width * 0.9:.1f}" height="{HEIGHT - _BOTTOM - y:.1f}"'
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>')
            if half:
                middle, low, high = x + width * 0.45, up.at(max(0.0, value - half)), up.at(value + half)
                ends = f'y1="{low:.1f}" x2="{middle:.1f}" y2="{high:.1f}"'
                parts.append(f'<line x1="{middle:.1f}" {ends} stroke="#1a202c" stroke-width="1.5"/>')
    parts.append(_legend(list(series)))
    return _svg(parts)


def _svg(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    return f'{head} font-size="11" role="img">\n' + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'


def _frame(title: str, x_label: str, y_label: str, up: _Axis) -> str:
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    parts.append(_text(WIDTH / 2, 16, title, "middle", ' font-size="13" font-weight="bold"'))
    parts.append(_text(_LEFT, 30, y_label))
    if x_label:
        parts.append(_text(WIDTH - _RIGHT, HEIGHT - _BOTTOM + 28, x_label, "end"))
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    return "\n".join(parts)


def _legend(names: Sequence[str]) -> str:
    parts, x, y = [], float(_LEFT), HEIGHT - 30.0
    for number, name in enumerate(names):
        if x + 22 + 6.2 * len(name) > WIDTH - _RIGHT:
            x, y = float(_LEFT), y + 16
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, y, name))
        x += 26 + 6.2 * len(name)
    return "\n".join(parts)
