"""The scenario on a fleet of its own: every row on tokens, bytes and reasons; no verdict on time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from deploy.local.cli import scenario_on
from deploy.local.fleet import running_fleet
from deploy.local.ports import AddressPlan
from deploy.local.report import Reporter, write_json
from deploy.local.scenario.run import ROWS, Result
from deploy.local.scenario.world import DOCUMENT_TOKENS
from deploy.local.spec import FleetSpec

_TIME_SCALE = 0.5  # model time runs twice as fast: verdicts do not rest on it
_FIELDS = {
    "number",
    "title",
    "destination",
    "prefill",
    "source",
    "reason",
    "prompt_tokens",
    "cached_tokens",
    "pulled_tokens",
    "bytes_received",
    "bytes_served",
    "ttft_ms",
    "expected",
    "verdict",
    "problems",
}

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> FleetSpec:
    out_dir = tmp_path_factory.mktemp("fleet") / "out"
    return FleetSpec(AddressPlan("127.0.41", 2000), out_dir=out_dir, time_scale=_TIME_SCALE)


@pytest.fixture(scope="module")
def result(spec: FleetSpec) -> Result:
    """One run for all tests of the module; the fleet has stopped when they look."""

    async def run() -> Result:
        report = Reporter()
        async with running_fleet(spec, report.progress) as fleet:
            return await scenario_on(fleet, report, judge_ttft=False)

    return asyncio.run(run())


def test_all_rows_and_checks_come_out_as_expected(result: Result) -> None:
    assert {row.title: row.problems for row in result.rows if row.problems} == {}
    assert {check.title: check.problems for check in result.checks if check.problems} == {}
    assert [row.number for row in result.rows] == list(range(1, ROWS + 1))
    assert result.as_expected


def test_bytes_that_moved_are_tokens_times_bytes_a_token(result: Result, spec: FleetSpec) -> None:
    """Independent of the scenario's own verdicts: from the table alone."""
    rows = {row.number: row for row in result.rows}
    for number in (1, 2, 4, 5, 6, 10):
        row = rows[number]
        assert (row.source, row.pulled_tokens, row.bytes_received, row.bytes_served) == ("", 0, 0, 0), row
    for number in (3, 7, 9):
        row = rows[number]
        assert row.pulled_tokens >= DOCUMENT_TOKENS
        assert row.bytes_received == row.bytes_served == row.pulled_tokens * spec.kv_bytes_per_token, row
    assert rows[1].cached_tokens == rows[4].cached_tokens == 0
    assert min(rows[n].cached_tokens for n in (2, 5, 6)) >= DOCUMENT_TOKENS - spec.block_size
    assert rows[11].pulled_tokens == 0 < rows[12].pulled_tokens
    for number in (11, 12):
        row = rows[number]
        assert row.bytes_received == row.bytes_served > row.pulled_tokens * spec.kv_bytes_per_token, row


def test_json_has_every_field_of_every_row(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    write_json(path, result.rows, result.checks)
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == ROWS
    assert all(row.keys() == _FIELDS for row in rows)
    assert {row["verdict"] for row in rows} == {"as expected"}
