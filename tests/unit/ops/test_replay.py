"""Replay decides with the product's own rule on what was recorded."""

from __future__ import annotations

import json
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest

from epp import cli
from epp.core.thresholds import PolicyTable, PullSettings, PullThresholds, everywhere
from epp.core.types import Outcome
from epp.ops.replay import Summary, redecide_files
from epp.telemetry.ledger_file import LedgerFile
from tests.unit.core.test_endpoint_picker import Pool
from tests.unit.core.test_pull_lifecycle import busy_pool


def document(body: str) -> str:
    return f"apiVersion: kvpull/v1alpha1\nkind: PullThresholds\nspec: {body}\n"


def record(pool: Pool, path: Path, count: int = 30, thresholds: PullThresholds | None = None) -> list[str]:
    """Ask, end, write; the reasons."""
    if thresholds is not None:
        pool.picker.sources.set_thresholds(thresholds)
    decisions = [pool.ask(f"r{number}") for number in range(count)]
    for decision in decisions:
        pool.picker.release(decision.decision_id, Outcome(status=200))
    pool.picker.expire(100.0)
    file = LedgerFile(path)
    file.write(pool.picker.records.take_finished(), 0.0)
    file.close()
    return [decision.choice.reason.value for decision in decisions]


def replay(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["replay", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_thresholds_that_were_in_force_make_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = busy_pool()
    pool.hold("a", 100)
    text = document("{default: {minCachedTokenDelta: 1000, maxInflightPulls: 3}}")
    (tmp_path / "t.yaml").write_text(text)
    rules = everywhere(PullSettings(min_cached_token_delta=1000, max_inflight_pulls=3))
    reasons = record(pool, tmp_path / "l.jsonl", thresholds=rules)
    assert len(set(reasons)) > 1, "a ledger in which everything is equal proves little"
    status, said = replay(capsys, str(tmp_path / "l.jsonl"), "--thresholds", str(tmp_path / "t.yaml"))
    assert status == 0
    assert (said["decisions"], said["differing"], said["inexact"], said["unreadable"]) == (30, 0, 0, 0)
    assert said["was_pulls"] == said["pulls"] == reasons.count("pull")
    assert said["was_tokens"] == said["tokens"] > 0


def test_other_thresholds_and_what_they_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off = everywhere(PullSettings(enabled=False))
    assert set(record(busy_pool(), tmp_path / "l.jsonl", 4, off)) == {"switched_off"}
    (tmp_path / "on.yaml").write_text(document("{default: {minCachedTokenDelta: 3200}}"))
    model = "{overrides: [{match: {model: m}, set: {minCachedTokenDelta: 3201}}]}"
    (tmp_path / "z-model.yaml").write_text(document(model))
    ledger, on = str(tmp_path / "l.jsonl"), ["--thresholds", str(tmp_path / "on.yaml")]
    _, said = replay(capsys, ledger, *on)
    assert (said["was_pulls"], said["pulls"], said["tokens"]) == (0, 4, 4 * 3200)
    assert said["changes"] == [["switched_off", "pull", 4]]
    assert said["differences"][0]["source"] == "b/0"
    _, said = replay(capsys, ledger, *on, "--thresholds", str(tmp_path / "z-model.yaml"), "--show", "1")
    assert said["changes"] == [["switched_off", "below_delta", 4]]
    assert len(said["differences"]) == 1
    _, said = replay(capsys, ledger, "--producer-delta", "1")
    assert said["pulls"] == 4
    _, said = replay(capsys, ledger)
    assert said["changes"] == [["switched_off", "no_threshold", 4]]


def test_what_no_threshold_changes_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = Pool()
    decision = pool.ask("untokenised", token_ids=None)
    pool.picker.release(decision.decision_id, Outcome(status=200))
    for endpoint in pool.picker.endpoints:
        pool.picker.cache.on_disconnect(endpoint.id, 0.0)
    decision = pool.ask("no claim")
    pool.picker.release(decision.decision_id, Outcome(status=200))
    file = LedgerFile(tmp_path / "l.jsonl")
    file.write(pool.picker.records.take_finished(), 0.0)
    file.close()
    _, said = replay(capsys, str(tmp_path / "l.jsonl"), "--producer-delta", "1")
    assert (said["decisions"], said["differing"]) == (2, 0)


def test_a_band_that_was_cut_is_inexact_but_never_a_false_difference(tmp_path: Path) -> None:
    pool = busy_pool()
    for number in range(10, 30):
        pool.add(f"e{number}", number)
        pool.hold(f"e{number}")
        pool.metrics(f"e{number}", waiting=50.0)
    subset = frozenset({"10.0.0.0", "10.0.0.2", *(f"10.0.0.{n}" for n in range(10, 30))})
    for number in range(10):
        decision = pool.ask(f"r{number}", subset=subset)
        assert decision.choice.band_size >= 20
        pool.picker.release(decision.decision_id, Outcome(status=200))
    pool.picker.expire(100.0)
    file = LedgerFile(tmp_path / "l.jsonl")
    file.write(pool.picker.records.take_finished(), 0.0)
    file.close()
    summary = Summary()
    rows = list(redecide_files([tmp_path / "l.jsonl"], PolicyTable(100, configured=True), summary))
    assert summary.inexact == 10
    assert [row.was_reason for row in rows if row.differs] == []


def test_lines_that_are_no_records_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l.jsonl"
    record(busy_pool(), path, 1)
    good = json.loads(path.read_text())
    with path.open("a") as file:
        for bad in (
            "{",
            "[]",
            "null",
            "7",
            json.dumps(good | {"format": 99}),
            json.dumps(good | {"inputs": None}),
            json.dumps(good | {"reason": "made up"}),
            json.dumps(good | {"inputs": good["inputs"] | {"holders": [{}]}}),
            "[" * 100_000,
        ):
            file.write(bad + "\n")
    status, said = replay(capsys, str(path), "--producer-delta", "1")
    assert (status, said["decisions"], said["unreadable"]) == (0, 1, 9)
    (tmp_path / "empty").write_text("")
    assert replay(capsys, str(tmp_path / "empty"))[0] == 1


def test_text_for_people_and_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = busy_pool()
    decision = pool.ask("r\x1b[31m")
    pool.picker.release(decision.decision_id, Outcome(status=200))
    record(pool, tmp_path / "l.jsonl", 0)
    assert cli.main(["replay", str(tmp_path / "l.jsonl"), "--producer-delta", "9999"]) == 0
    said = capsys.readouterr().out
    assert "1 decisions, 1 decided differently, 0 inexact" in said
    assert "pull -> below_delta" in said
    assert "\x1b" not in said
    assert cli.main(["replay", str(tmp_path / "absent")]) == 2
    assert cli.main(["replay", str(tmp_path / "l.jsonl"), "--thresholds", str(tmp_path / "absent")]) == 2
    (tmp_path / "bad.yaml").write_text(document("{default: {minCachedTokenDelta: 0}}"))
    capsys.readouterr()
    assert cli.main(["replay", str(tmp_path / "l.jsonl"), "--thresholds", str(tmp_path / "bad.yaml")]) == 2
    assert "bad.yaml: spec.default.minCachedTokenDelta" in capsys.readouterr().err


def test_a_source_class_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = busy_pool()
    (b,) = [e for e in pool.picker.endpoints if e.id.pod == "b"]
    pool.picker.upsert_endpoint(changed(b, labels={"kvpull/source-class": "far", "secret": "label"}))
    record(pool, tmp_path / "l.jsonl", 2)
    assert "secret" not in (tmp_path / "l.jsonl").read_text()
    far = "overrides: [{match: {sourceClass: far}, set: {enabled: false}}]"
    (tmp_path / "t.yaml").write_text(document(f"{{default: {{minCachedTokenDelta: 1}}, {far}}}"))
    _, said = replay(capsys, str(tmp_path / "l.jsonl"), "--thresholds", str(tmp_path / "t.yaml"))
    assert said["changes"] == [["pull", "switched_off", 2]]
