"""A recorded ledger as a trace: what it recorded comes back, and what it lacks is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epp.cli import main
from epp.core.errors import ConfigError
from epp.telemetry.decision_json import decision_json
from simulator.fleet import Fleet
from simulator.ledger_trace import BLOCK_TOKENS, is_ledger, read_ledger
from simulator.traces import TraceReplay, from_zero
from tests.unit.simulator.test_fleet import pool_run
from tests.unit.simulator.world import AFFINITY, LOAD_FIRST, fleet

UNIX_S = 1_790_000_000.0


def write_ledger(several: Fleet, path: Path) -> Path:
    """As `epp.telemetry.ledger_file` does: a line when a request has ended."""
    lines = [
        json.dumps({"decided_unix_s": round(record.decided_at_s + UNIX_S, 3)} | decision_json(record))
        for record in several.picker.records.take_finished()
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Fleet, Path]:
    several = pool_run(AFFINITY, 1)
    return several, write_ledger(several, tmp_path / "ledger.jsonl")


def test_arrivals_and_lengths_are_those_recorded(recorded: tuple[Fleet, Path]) -> None:
    several, path = recorded
    requests = from_zero(read_ledger(path).requests)
    sent = [r.sent_s for r in several.records]
    assert len(requests) == len(several.records) > 30
    assert [r.at_s for r in requests] == pytest.approx([s - sent[0] for s in sent], abs=2e-3)
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(4096 + 64, 16)}


def test_prefixes_are_shared_as_far_as_the_ledger_tells(recorded: tuple[Fleet, Path]) -> None:
    """Six prefixes of 4,096 tokens: whoever was held before begins with one of the first six texts."""
    _, path = recorded
    ledger = read_ledger(path)
    heads = {request.blocks[: 4096 // BLOCK_TOKENS] for request in ledger.requests}
    assert 6 <= len(heads) < len(ledger.requests) / 2
    taken = [count for name, count in ledger.notes.items() if "deepest holder" in name]
    assert taken == [len(ledger.requests) - len(heads)]


def test_a_replay_reuses_what_was_reused(recorded: tuple[Fleet, Path]) -> None:
    several, path = recorded
    again = fleet(AFFINITY, engines=3, seed=1)
    TraceReplay(from_zero(read_ledger(path).requests)).run(again, 1)
    was, now = (sum(r.computed_tokens for r in f.records) for f in (several, again))
    assert now == pytest.approx(was, rel=0.25)
    assert now < 0.5 * sum(r.prompt_tokens for r in again.records)  # without prefixes it would be all of it


def test_what_is_older_than_the_ledger_is_counted_and_computed_once_more(
    recorded: tuple[Fleet, Path],
) -> None:
    _, path = recorded
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[-10:]) + lines[0][:40])  # the process died while it wrote
    ledger = read_ledger(path)
    assert len(ledger.requests) == 10
    assert ledger.notes["ledger: prefixes older than the ledger (computed once more)"] >= 1
    assert ledger.notes["ledger: half lines left out"] == 1


def test_answers_of_unknown_length_are_taken_as_the_mean(recorded: tuple[Fleet, Path]) -> None:
    _, path = recorded
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["outcome"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = read_ledger(path)
    assert ledger.notes["ledger: answers of unknown length (taken as the mean)"] == 1
    assert {r.output_tokens for r in ledger.requests} == {16}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 99}, "newer"),
        ({"prompt_tokens": "many"}, "no decision record"),
        ({"candidates": 3}, ":1: no"),
    ],
)
def test_a_record_that_lacks_something_is_refused_with_its_line(
    recorded: tuple[Fleet, Path], change: dict[str, object], told: str
) -> None:
    _, path = recorded
    row = json.loads(path.read_text().splitlines()[0]) | change
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=told):
        read_ledger(path)


def test_the_command_answers_from_a_ledger_and_says_what_it_lacked(
    recorded: tuple[Fleet, Path], tmp_path: Path
) -> None:
    _, path = recorded
    assert is_ledger(path)
    config = tmp_path / "config.yaml"
    config.write_text(LOAD_FIRST)
    assert not is_ledger(config)
    where = ["--config", str(config), "--trace", str(path), "--out", str(tmp_path / "out")]
    assert main(["simulate", *where, "--engines", "3", "--seeds", "1"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    inputs = report["inputs"]
    assert inputs["requests"] == len(path.read_text().splitlines())
    assert inputs["ledger: prefixes older than the ledger (computed once more)"] == 0
    assert sum(report["arms"]["no pulls"]["requests_by_endpoint"].values()) == inputs["requests"]
