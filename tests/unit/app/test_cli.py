"""The command line refuses what it cannot mean, with a sentence and status 2."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from epp import cli


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("2s", 2), ("1m", 60), ("1.5", 1.5), ("1h", 3600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert cli.duration_s(text) == seconds


@pytest.mark.parametrize(("text", "value"), [("false", False), ("FALSE", False), ("true", True)])
def test_false_means_false(text: str, value: bool) -> None:
    """S-G07."""
    assert cli.boolean(text) is value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (cli.duration_s, "-1s"),
        (cli.duration_s, "soon"),
        (cli.boolean, "0"),
        (cli.port, "99999"),
        (cli.port, "-1"),
        (cli.port, "x"),
        (cli.body_bytes, "0"),
        (cli.body_bytes, "-1"),
        (cli.body_bytes, "3000000000"),
        (cli.body_bytes, "9" * 5000),
        (cli.file_bytes, "4095"),
        (cli.file_bytes, "9" * 5000),
        (cli.file_count, "0"),
        (cli.file_count, "9" * 5000),
    ],
)
def test_refused_values(parse, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        parse(text)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "cannot be read"),
        (["--log-level", "loud"], "--log-level"),
    ],
)
def test_a_start_that_cannot_be_is_a_sentence(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["epp", "--config-file", str(tmp_path / "absent.yaml"), *more]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
