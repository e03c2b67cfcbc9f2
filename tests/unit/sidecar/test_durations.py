"""One duration syntax, Go's, for every flag and parameter (picker and sidecar)."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.durations import duration_flag_s, parse_duration_s, positive_duration_flag_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("+0", 0.0),
        ("0s", 0.0),
        ("50ms", 0.05),
        ("2s", 2.0),
        ("+2s", 2.0),
        ("1.5m", 90.0),
        ("1.s", 1.0),
        (".5s", 0.5),
        ("1m30s", 90.0),
        ("1h15m30.918s", 4530.918),
        ("30s1m", 90.0),
        ("10ns", 1e-8),
        ("10us", 1e-5),
        ("10µs", 1e-5),
        ("10μs", 1e-5),
    ],
)
def test_what_go_reads_is_read(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds, rel=1e-12)
    assert duration_flag_s(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "5 s",
        " 5s",
        "5s\n",
        "-1s",
        "soon",
        "5sec",
        "s",
        ".s",
        ".",
        "1d",
        "1,5s",
        "1e3s",
        "٣s",
        "nan",
        "inf",
    ],
)
def test_what_go_refuses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration_s(text)


@pytest.mark.parametrize("text", ["9999999999s", "9" * 19 + "h"])
def test_no_duration_of_centuries(text: str) -> None:
    with pytest.raises(ValueError, match="at most"):
        parse_duration_s(text)


def test_flags_take_plain_seconds_and_say_what_they_got() -> None:
    assert [duration_flag_s(text) for text in ("5", "1.5", ".5")] == [5.0, 1.5, 0.5]
    with pytest.raises(argparse.ArgumentTypeError, match="'soon': expected a duration"):
        duration_flag_s("soon")
    with pytest.raises(argparse.ArgumentTypeError, match="'0s' is not a duration above zero"):
        positive_duration_flag_s("0s")
    assert positive_duration_flag_s("1ms") == 0.001


@given(st.text(alphabet="0123456789.hmsnuµ+- ", max_size=40))
def test_any_text_is_a_number_or_a_refusal(text: str) -> None:
    try:
        seconds = parse_duration_s(text)
    except ValueError:
        return
    assert 0.0 <= seconds <= 1e9
