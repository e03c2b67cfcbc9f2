"""What a request's headers say of how it wants to be served. Of two names for a thing the new one wins.

A value that makes no sense is no wish: headers never fail a request.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from epp.extproc import wire
from epp.extproc.events import Headers

_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,512}")


@dataclass(frozen=True, slots=True)
class Wishes:
    """`model`: the name to ask the engine for instead of the body's. `if_available`: an answer from
    cache, or none."""

    model: str | None = None
    objective: str | None = None
    fairness_id: str | None = None
    if_available: bool = False
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None


def read_wishes(headers: Headers) -> Wishes:
    return Wishes(
        model=first_name(headers, wire.MODEL_NAME_REWRITE),
        objective=first_name(headers, wire.OBJECTIVE),
        fairness_id=first_name(headers, wire.FAIRNESS_ID),
        if_available=any(_prefers(value) for value in headers.all(wire.PREFER)),
        slo_ttft_ms=_milliseconds(headers, wire.SLO_TTFT_MS),
        slo_tpot_ms=_milliseconds(headers, wire.SLO_TPOT_MS),
    )


def first_name(headers: Headers, names: tuple[str, ...]) -> str | None:
    """What the first of these headers that has a value says, where that can be a name."""
    value = next((found for name in names if (found := headers.first(name))), "").strip()
    return value if _NAME.fullmatch(value) else None


def _prefers(value: str) -> bool:
    """RFC 7240: preferences by comma, each with parameters behind `;`."""
    return any(part.partition(";")[0].strip().lower() == wire.IF_AVAILABLE for part in value.split(","))


def _milliseconds(headers: Headers, names: tuple[str, str]) -> float | None:
    text = next((found for name in names if (found := headers.first(name))), "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
