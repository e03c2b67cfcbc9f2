"""The exported ledger: whole lines, rotation, failing disks, nothing secret, and readable again."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from epp.core.decision_record import DecisionRecord
from epp.core.types import Outcome
from epp.telemetry import ledger_file
from epp.telemetry.decision_json import decision_json, read_inputs
from epp.telemetry.ledger import DecisionLedger
from epp.telemetry.ledger_file import LedgerFile
from epp.telemetry.pull_metrics import PullMetrics
from tests.unit.core.rows import info
from tests.unit.core.test_endpoint_picker import Pool
from tests.unit.core.test_pull_lifecycle import busy_pool, report


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(count: int) -> list[DecisionRecord]:
    pool = Pool()
    for number in range(count):
        decision = pool.ask(f"r{number}", now_s=float(number))
        pool.picker.release(decision.decision_id, Outcome(status=200))
    return pool.picker.records.take_finished()


def test_files_rotate_by_size_and_hold_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    rows = records(40)
    size = len(json.dumps(decision_json(rows[0]), separators=(",", ":"))) + 40
    file = LedgerFile(path, max_bytes=10 * size, keep=3)
    file.write(rows[:25], 1000.0)
    file.write(rows[25:], 1000.0)
    file.close()
    files = [path, tmp_path / "ledger.jsonl.1", tmp_path / "ledger.jsonl.2"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(f.stat().st_size <= 10 * size for f in files)
    kept = [row["request_id"] for f in reversed(files) for row in lines(f)]
    assert kept == [f"r{n}" for n in range(40 - len(kept), 40)], "the newest, in order, none torn"
    assert lines(path)[-1]["decided_unix_s"] == 1039.0
    assert (file.written, file.dropped) == (40, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_restarted_picker_appends(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for row in records(2):
        file = LedgerFile(path)
        file.write([row], 0.0)
        file.close()
    assert [row["request_id"] for row in lines(path)] == ["r0", "r1"]


def test_an_id_that_is_no_unicode_does_not_stop_the_ledger(tmp_path: Path) -> None:
    (record,) = records(1)
    ids = ["\udcff", "\x00\n{", "plain"]
    rows = [replace(record, decision=replace(record.decision, request_id=name)) for name in ids]
    file = LedgerFile(tmp_path / "l.jsonl")
    file.write(rows, 0.0)
    file.close()
    assert [row["request_id"] for row in lines(tmp_path / "l.jsonl")] == ids
    assert (file.written, file.dropped) == (3, 0)


def test_one_file_only(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path, max_bytes=1, keep=1)
    file.write(records(3), 0.0)
    file.close()
    assert list(tmp_path.iterdir()) == [path]
    assert [row["request_id"] for row in lines(path)] == ["r2"]


def test_a_full_disk_costs_records_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, full = tmp_path / "ledger.jsonl", True
    real = ledger_file.FileIO.write

    class Disk(ledger_file.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if full:
                real(self, data[:10])  # a torn line
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(self, data)

    monkeypatch.setattr(ledger_file, "FileIO", Disk)
    rows = records(5)
    file = LedgerFile(path)
    file.write(rows[:2], 0.0)
    file.write(rows[2:3], 0.0)
    full = False
    file.write(rows[3:], 0.0)
    file.close()
    assert (file.written, file.dropped) == (2, 3)
    assert [r.message for r in caplog.records] == [
        f"decision ledger {path} cannot be written, records are lost: No space left on device"
    ]
    whole = [json.loads(line)["request_id"] for line in path.read_text().splitlines() if line.endswith("}")]
    assert whole == ["r3", "r4"], "a torn line takes no whole one with it"


async def test_the_pump_moves_records_out_of_the_core(tmp_path: Path) -> None:
    pool, registry = busy_pool(), CollectorRegistry()
    now_s = 0.0
    path = tmp_path / "ledger.jsonl"
    ledger = DecisionLedger(
        pool.picker,
        PullMetrics(registry),
        registry,
        LedgerFile(path),
        clock=lambda: now_s,
        unix_clock=lambda: 5000.0 + now_s,
    )
    kept, silent = pool.ask("kept"), pool.ask("silent")
    pool.picker.pull_finished(report(kept.decision_id), kept.computing)
    for decision in (kept, silent):
        pool.picker.release(decision.decision_id, Outcome(status=200, ttft_s=0.25, cached_tokens=3200))
    await ledger.pump()
    assert [row["request_id"] for row in lines(path)] == ["kept"]
    now_s = 11.0
    await ledger.aclose()
    first, second = lines(path)
    assert first["pull"] == {
        "state": "reported",
        "promised_tokens": 3200,
        "source": "10.0.0.1:7777",
        "asked_tokens": 3200,
        "received_tokens": 3200,
        "received_bytes": 1 << 20,
        "reason": "ok",
        "ms": 12.5,
        "fallback": False,
    }
    assert (first["outcome"]["ttft_s"], first["outcome"]["cached_tokens"]) == (0.25, 3200)
    assert (second["request_id"], second["pull"]) == ("silent", {"state": "unknown"})
    assert second["decided_unix_s"] == 5000.0
    assert registry.get_sample_value("kvpull_epp_ledger_records_total", {"result": "written"}) == 2
    assert registry.get_sample_value("kvpull_epp_pulls_settled_total", {"outcome": "unknown"}) == 1
    assert registry.get_sample_value("kvpull_epp_pulls_settled_total", {"outcome": "kept"}) == 1


async def test_without_a_file_the_metrics_are_fed_all_the_same() -> None:
    pool, registry = busy_pool(), CollectorRegistry()
    ledger = DecisionLedger(pool.picker, PullMetrics(registry), registry, clock=lambda: 100.0)
    decision = pool.ask()
    pool.picker.release(decision.decision_id)
    await ledger.pump()
    assert registry.get_sample_value("kvpull_epp_pulls_settled_total", {"outcome": "unknown"}) == 1
    assert pool.picker.records.take_finished() == []


def test_inputs_survive_the_way_through_json() -> None:
    pool = busy_pool()
    pool.metrics("b", waiting=50.0, info=info(instance="bbb", p2p_addr="10.0.0.1:7777"))
    for pod in "ac":
        pool.metrics(pod, waiting=0.0, info=info(instance=pod))
    for endpoint in pool.picker.endpoints:
        pool.picker.update_refusals(endpoint.id, {("zzz", "auth"): 1.0}, 0.0)
    decision = pool.ask("r")
    record = pool.picker.find_decision("r")
    assert record is not None
    text = json.dumps(decision_json(record))
    inputs = read_inputs(json.loads(text))
    (holder,) = inputs.holders
    (original,) = decision.choice.holders
    assert holder.endpoint == original.endpoint
    assert original.match._replace(known_empty_start=False) == holder.match
    assert holder.load == original.load
    assert holder.metrics.waiting_requests == 50.0
    assert holder.metrics.info is not None
    assert inputs.computing.metrics.info is not None
    assert inputs.computing.endpoint.id == decision.computing
    assert inputs.computing.metrics.waiting_requests == 0.0
    assert holder.metrics.info.pull_key == inputs.computing.metrics.info.pull_key
    assert (holder.metrics.info.instance, holder.metrics.info.p2p_addr) == ("bbb", "10.0.0.1:7777")
    assert inputs.refused_peers == decision.refused_peers == {"zzz"}
    unknown = json.loads(text)
    unknown["inputs"]["computing"] |= {"waiting": None, "engine": None}
    assert read_inputs(unknown).computing.metrics.waiting_requests is None
    assert read_inputs(unknown).computing.metrics.info is None


def test_no_prompt_and_no_salt_is_in_a_record() -> None:
    pool = busy_pool()
    marked = [7_654_321, *range(500)]
    pool.ask("r", token_ids=marked, cache_salt="a salt nobody may see", lora_name="lora")
    record = pool.picker.find_decision("r")
    assert record is not None
    text = json.dumps(decision_json(record)) + repr(record)
    assert "7654321" not in text
    assert "nobody may see" not in text


async def test_a_fault_of_ours_does_not_end_the_ledger(caplog: pytest.LogCaptureFixture) -> None:
    pool, registry, tried = busy_pool(), CollectorRegistry(), asyncio.Event()

    class Broken(PullMetrics):
        def settled(self, record: DecisionRecord) -> None:
            tried.set()
            raise ZeroDivisionError(record.decision.decision_id)

    ledger = DecisionLedger(pool.picker, Broken(registry), registry, clock=lambda: 100.0)
    pool.ask()
    running = asyncio.create_task(ledger.run())
    async with asyncio.timeout(20):
        await tried.wait()
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    assert [r.exc_info is not None for r in caplog.records] == [True]
