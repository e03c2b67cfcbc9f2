"""`make demo ENGINE=vllm` on a fleet of its own, with two engines: every row on tokens, bytes and reasons."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deploy.local.cli import scenario_on
from deploy.local.fleet import running_fleet
from deploy.local.ports import AddressPlan
from deploy.local.report import Reporter
from deploy.local.vllm.parts import PODS, VllmFleet, vllm_spec
from deploy.local.vllm.run import wanted_rows
from deploy.local.vllm.scene import DOCUMENT_TOKENS, OWNER

QUIET = (1, 2, 4, 5, 6, 10)

pytestmark = pytest.mark.timeout(1200)


def test_the_scenario_on_real_engines(tmp_path: Path) -> None:
    spec = vllm_spec(AddressPlan("127.0.49", 2900), tmp_path / "out", PODS[:2])
    report = Reporter()

    async def run() -> None:
        async with running_fleet(spec, report.progress, VllmFleet) as fleet:
            result = await scenario_on(fleet, report, judge_ttft=False)
        assert {row.title: row.problems for row in result.rows if row.problems} == {}
        assert {check.title: check.problems for check in result.checks if check.problems} == {}
        assert result.as_expected
        rows = {row.number: row for row in result.rows}
        assert tuple(rows) == wanted_rows(2) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12)
        for number in QUIET:  # from the table alone, whatever the rows say of themselves
            row = rows[number]
            assert (row.source, row.pulled_tokens, row.bytes_received, row.bytes_served) == ("", 0, 0, 0), row
        for pulled in (rows[3], rows[7]):
            assert (pulled.source, pulled.destination) == (OWNER, PODS[1])
            assert pulled.pulled_tokens >= DOCUMENT_TOKENS
            moved = pulled.pulled_tokens * spec.kv_bytes_per_token
            assert pulled.bytes_received == pulled.bytes_served == moved
        killed = rows[8]
        assert (killed.source, killed.destination, killed.pulled_tokens) == (OWNER, PODS[1], 0)
        without, split = rows[11], rows[12]
        assert (without.prefill, split.prefill, without.source, split.source) == (OWNER, OWNER, "", PODS[1])
        assert without.pulled_tokens == 0 < split.pulled_tokens
        assert without.bytes_received == without.bytes_served > 0, "handed over, and nothing else"
        assert split.bytes_received == split.bytes_served > split.pulled_tokens * spec.kv_bytes_per_token
        assert [rows[number].cached_tokens for number in (1, 4, 5, 10)] == [0, 0, 0, 0]

    asyncio.run(run())
    assert not spec.run_dir.exists()
