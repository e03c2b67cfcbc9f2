"""Two whole pickers: the second one is started with the first one's snapshot, by command line alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from epp import cli
from tests.integration.kvevents.conftest import new_engine as new_engine
from tests.integration.kvevents.rig import HOST, Engine, stored
from tests.integration.siblings.certificates import NAME, Authority

WAIT_S = 60.0
ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "config" / "epp" / "load-first.yaml"
LIVE = 'kvpull_epp_claim_state{endpoint="engine-a/0",state="live"} 1.0'


@contextlib.asynccontextmanager
async def picker(endpoints: Path, *more: str) -> AsyncIterator[dict[str, int]]:
    """A picker process that has said it is ready; yields what it said."""
    read_fd, write_fd = os.pipe()
    arguments = ["--config-file", str(CONFIG), "--endpoints-file", str(endpoints), "--listen-host", HOST]
    arguments += ["--tokenizer", str(ROOT / "config" / "tokenizer")]
    ports = [part for name in ("grpc", "grpc-health", "metrics") for part in (f"--{name}-port", "0")]
    command = ["-m", "epp", *arguments, *ports, *more, "--drain-timeout", "1s", "--ready-fd", str(write_fd)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, pass_fds=[write_fd])
    os.close(write_fd)
    try:
        async with asyncio.timeout(WAIT_S):
            with os.fdopen(read_fd) as pipe:
                line = await asyncio.to_thread(pipe.readline)
        yield json.loads(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), WAIT_S)


async def metrics_with(ready: dict[str, int], *lines: str) -> str:
    """The metrics page as soon as it has all of `lines`."""
    url = f"http://{HOST}:{ready['metrics_port']}/metrics"
    async with aiohttp.ClientSession() as session, asyncio.timeout(WAIT_S):
        while True:
            async with session.get(url) as answer:
                page = await answer.text()
            if set(lines) <= set(page.splitlines()):
                return page


async def test_a_second_picker_takes_over_the_first_ones_view(
    new_engine: Callable[[], Engine], tmp_path: Path
) -> None:
    engine = new_engine()
    row = {"pod": "engine-a", "host": HOST, "serving_port": 8000, "metrics_port": 1}
    row |= {"events_port": engine.events_port, "replay_port": engine.replay_port}
    endpoints = tmp_path / "endpoints.json"
    endpoints.write_text(json.dumps({"endpoints": [row]}))
    certificates = str(Authority().issue(tmp_path / "tls"))
    tls = ("--sibling-tls-path", certificates, "--snapshot-port", "0", "--sibling-server-name", NAME)
    async with picker(endpoints, *tls) as first:
        await engine.subscribed()
        await metrics_with(first, LIVE)
        for block in range(30):
            await engine.publish(stored(block))
        await metrics_with(first, 'kvpull_epp_index_blocks{endpoint="engine-a/0",tier="device"} 30.0')
        engine.buffer = engine.buffer[-20:]
        async with picker(endpoints, *tls, "--sibling", f"{HOST}:{first['snapshot_port']}") as second:
            page = await metrics_with(second, LIVE)
        await metrics_with(first, 'kvpull_epp_snapshots_given_total{outcome="served"} 1.0')
    for line in (
        'kvpull_epp_index_blocks{endpoint="engine-a/0",tier="device"} 30.0',
        'kvpull_epp_kv_events_total{endpoint="engine-a/0",outcome="snapshots_confirmed"} 1.0',
        'kvpull_epp_snapshot_fetch_info{outcome="complete"} 1.0',
        'kvpull_epp_snapshot_rows{outcome="adopted"} 1.0',
    ):
        assert line in page.splitlines()
    assert engine.requests == [0, 30 - 16]


@pytest.mark.parametrize("flags", [["--snapshot-port", "0"], ["--sibling", "epp:9004"]])
@pytest.mark.parametrize("tls", [[], ["--sibling-tls-path", "/nowhere"]])
def test_without_certificates_there_is_no_start(
    flags: list[str], tls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints = tmp_path / "endpoints.json"
    endpoints.write_text('{"endpoints": []}')
    arguments = ["epp", "--config-file", str(CONFIG), "--endpoints-file", str(endpoints)]
    assert cli.main([*arguments, *flags, *tls]) == 2
    error = capsys.readouterr().err
    assert ("tls.crt" in error) if tls else ("--sibling-tls-path" in error)
