"""Replay decides with the product's own rule on what was recorded."""

from __future__ import annotations

import json
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest

from engine_plugin.identity import EndpointId
from epp import cli
from epp.config import parse_config
from epp.core.pull_curves import PullCurve, RecomputeCurve
from epp.core.speculation import SpeculationSettings
from epp.core.thresholds import MODE_COST, PolicyTable, PullSettings, PullThresholds, everywhere
from epp.core.types import Outcome
from epp.ops.replay import Summary, redecide_files
from epp.telemetry.ledger_file import LedgerFile
from tests.unit.core.test_endpoint_picker import Pool
from tests.unit.core.test_pull_lifecycle import busy_pool
from tests.unit.plugins.test_predicted_ttft import CONFIG


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


def test_what_is_on_its_way_to_the_computing_endpoint_counts_in_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise every replay of a burst would report pulls that were rightly not made."""
    pool = busy_pool(speculation=SpeculationSettings())
    for pod in "ac":
        pool.hold(pod, 1)  # its block size is known
    reasons = record(pool, tmp_path / "l.jsonl", 6)
    assert reasons == ["pull", *["below_delta"] * 5], "the others wait for what is on its way"
    _, said = replay(capsys, str(tmp_path / "l.jsonl"), "--producer-delta", "100")
    assert (said["differing"], said["pulls"]) == (0, reasons.count("pull"))


COSTS = PullSettings(
    min_cached_token_delta=100,
    recompute_seed=RecomputeCurve(20.0, 50.0),
    pull_seed=PullCurve(50.0, 2.0, 2_000.0),
)


def test_a_ledger_of_the_threshold_is_decided_again_by_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was predicted beside the threshold is what cost mode goes by, under the margin of now."""
    record(busy_pool(), tmp_path / "l.jsonl", thresholds=everywhere(COSTS))
    lines = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    priced = [line["predicted"]["cost_says"] for line in lines if line["predicted"]]
    pulls = sum(line["reason"] == "pull" for line in lines)
    cheaper = priced.count("pull")
    assert pulls > cheaper > 0, "else the two modes would not differ"
    for margin_ms, wanted in ((0, cheaper), (10_000, 0)):
        cost = f"{{mode: cost, marginMs: {margin_ms}}}"
        path = tmp_path / f"{margin_ms}.yaml"
        path.write_text(document(f"{{default: {{minCachedTokenDelta: 999999, cost: {cost}}}}}"))
        status, said = replay(capsys, str(tmp_path / "l.jsonl"), "--thresholds", str(path))
        assert (status, said["was_pulls"], said["pulls"]) == (0, pulls, wanted)
        assert said["changes"] == [["pull", "not_cheaper", pulls - wanted]]


def test_a_ledger_of_cost_mode_is_decided_again_by_a_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_cost = everywhere(changed(COSTS, mode=MODE_COST, min_cached_token_delta=999_999))
    reasons = record(busy_pool(), tmp_path / "l.jsonl", thresholds=by_cost)
    pulls = reasons.count("pull")
    assert pulls > 0
    (tmp_path / "t.yaml").write_text(document("{default: {minCachedTokenDelta: 999999}}"))
    _, said = replay(capsys, str(tmp_path / "l.jsonl"), "--thresholds", str(tmp_path / "t.yaml"))
    assert (said["was_pulls"], said["pulls"]) == (pulls, 0)
    assert ["pull", "below_delta", pulls] in said["changes"]


def test_a_ledger_of_a_policy_that_chose_its_source_makes_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The experimental scorer names one of several equal holders: a replay finds the same one."""
    pool = Pool(parse_config(CONFIG).settings)
    pool.hold("a")
    pool.hold("b")
    for pod in "ab":
        endpoint = EndpointId(pod)
        pool.picker.ledger.book(
            f"busy-{pod}", serving=endpoint, computing=endpoint, source=None, uncached_prompt_tokens=20_000
        )
    reasons = record(pool, tmp_path / "l.jsonl", 8, everywhere(changed(COSTS, mode=MODE_COST)))
    assert set(reasons) == {"pull"}
    cost = "{mode: cost, marginMs: 0}"
    (tmp_path / "t.yaml").write_text(document(f"{{default: {{minCachedTokenDelta: 100, cost: {cost}}}}}"))
    _, said = replay(capsys, str(tmp_path / "l.jsonl"), "--thresholds", str(tmp_path / "t.yaml"))
    assert (said["decisions"], said["pulls"], said["differing"], said["inexact"]) == (8, 8, 0, 0)
