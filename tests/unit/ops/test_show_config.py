"""`kvpull config check` and `explain`: exit statuses, wiring, everything that was added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epp.cli import main

CONFIGS = Path(__file__).parents[2] / "data" / "epp_configs"
GOOD, REFUSED = str(CONFIGS / "near.yaml"), str(CONFIGS / "refused" / "encode.yaml")
WARNED = str(CONFIGS / "placements.yaml")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([GOOD], 0),
        ([GOOD, WARNED], 0),
        ([GOOD, REFUSED], 2),
        ([REFUSED, WARNED, "--strict"], 2),
        ([WARNED, "--strict"], 1),
        ([str(CONFIGS / "absent.yaml")], 2),
    ],
)
def test_exit_status_of_check(arguments: list[str], status: int) -> None:
    assert main(["config", "check", *arguments]) == status


def test_check_looks_at_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "check", REFUSED, WARNED])
    out, err = capsys.readouterr()
    assert "always-disagg-multimodal-decider is not part of kvpull" in err
    assert f"{WARNED}: good" in out
    assert "deprecated: write llm-d.ai/v1alpha1" in out


def test_explain_shows_wiring_additions_defaults_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", WARNED]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "  prefix-cache-scorer reads prefix match of approx-prefix-cache-producer (default)" in out
    assert (
        "  approx-prefix-cache-producer: data producer, ADDED: prefix-cache-scorer needs prefix match" in out
    )
    assert "  spread (weighted-random-picker): picker" in out
    assert "    maxNumOfEndpoints: 2" in out
    assert "    lruCapacityPerServer: 31250 (default)" in out
    assert "  a request that finds no prefill endpoint is decoded without it, and counted" in out
    assert "feature gates: flowControl=false, haPopulateNonLeaderDatastore=true" in out
    assert any("is deprecated" in line for line in out[out.index("warnings") :])


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "--json", str(CONFIGS / "affinity.yaml")]) == 0
    body = json.loads(capsys.readouterr().out)
    assert set(body) == {"plugins", "wiring", "profiles", "stages", "gates", "notes"}
    assert {
        "consumer": "no-hit-lru-scorer",
        "data": "prefix match",
        "producer": "precise-prefix-cache-producer",
        "how": "named",
    } in body["wiring"]
    scorers = {row["name"]: row["weight"] for row in body["profiles"][0]["scorers"]}
    assert scorers["prefix-cache-scorer"] == 3.0
    plugins = {row["name"]: row for row in body["plugins"]}
    assert plugins["core-metrics-extractor"]["added"] == "queue-scorer needs engine metrics"
    assert plugins["no-hit-lru-scorer"]["parameters"]["lruSize"] == 1024
    assert "lruSize" in plugins["no-hit-lru-scorer"]["defaults"]


def test_explain_refuses_what_would_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", REFUSED]) == 2
    assert "is not part of kvpull" in capsys.readouterr().err
