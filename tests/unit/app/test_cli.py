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


@pytest.mark.parametrize("parameters", ["", "- {type: token-producer}"])
def test_precise_routing_without_exact_tokens_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parameters: str
) -> None:
    """No token-producer, or one that would only estimate: a sentence that says what to set."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        f"- {{type: precise-prefix-cache-producer}}\n{parameters}\n- {{type: max-score-picker}}\n"
        "schedulingProfiles:\n- {name: default, plugins: [{pluginRef: max-score-picker}]}\n"
    )
    endpoints = tmp_path / "endpoints.yaml"
    endpoints.write_text("endpoints: []\n")
    assert cli.main(["epp", "--config-file", str(config), "--endpoints-file", str(endpoints)]) == 2
    said = capsys.readouterr().err
    assert "nothing knows the engines' tokens" in said
    for what in ("parameters.local.path", "parameters.vllm.url", "--tokenizer"):
        assert what in said
