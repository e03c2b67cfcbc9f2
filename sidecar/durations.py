"""Durations as Go writes them (`500ms`, `2s`, `1m30s`), for flags and configuration of sidecar and picker.

One parser, so that a text means the same everywhere; negative durations mean nothing here and are refused.
Semantics: Go `time.ParseDuration`. Flags also take a plain number, as seconds.
"""

from __future__ import annotations

import argparse
import re
from typing import Final

EXAMPLE: Final = "expected a duration such as 500ms, 2s or 1m30s"
MAX_DURATION_S: Final = 1e9  # 31 years; Go stops at 292
_UNIT_S: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,  # the micro sign
    "μs": 1e-6,  # the Greek letter
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_NUMBER: Final = r"[0-9]{1,19}\.?[0-9]{0,19}|\.[0-9]{1,19}"
_PART: Final = re.compile(rf"({_NUMBER})({'|'.join(_UNIT_S)})")
_WHOLE: Final = re.compile(rf"\+?(?:(?:{_NUMBER})(?:{'|'.join(_UNIT_S)}))+")
_SECONDS: Final = re.compile(_NUMBER)


def parse_duration_s(text: str) -> float:
    """Seconds of a duration; "0" needs no unit.

    Raises:
        ValueError: no such text, or more than `MAX_DURATION_S`.
    """
    if text in ("0", "+0"):
        return 0.0
    if not _WHOLE.fullmatch(text):
        raise ValueError(EXAMPLE)
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(text))
    if seconds > MAX_DURATION_S:
        raise ValueError(f"at most {MAX_DURATION_S:.0f} seconds")
    return seconds


def duration_flag_s(text: str) -> float:
    """A command line's duration: `parse_duration_s`, or a plain number of seconds."""
    try:
        return parse_duration_s(text + "s" if _SECONDS.fullmatch(text) else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def positive_duration_flag_s(text: str) -> float:
    """The same for limits, which have to be above zero."""
    seconds = duration_flag_s(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration above zero")
    return seconds
