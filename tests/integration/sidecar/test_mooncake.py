"""The mooncake connector (experimental): one transfer id, the right rank's engine, no stale ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar import wire
from tests.integration.sidecar.doubles import Received, RecordingEngine, recording_engine, status
from tests.integration.sidecar.rig import COMPLETIONS, Rig, own_host, row, running

PREFILL = wire.PREFILLER_HOST_PORT
BODY = b'{"prompt":"p","max_tokens":9}'


class Bootstrap:
    """Answers /query; what it says may change."""

    def __init__(self) -> None:
        self.document: Any = {"0": {"engine_id": "zero"}, "1": {"engine_id": "one", "worker_addr": {}}}

    async def __call__(self, _: web.Request, received: Received) -> web.StreamResponse:
        assert (received.method, received.target) == ("GET", "/query")
        return web.json_response(self.document)


@asynccontextmanager
async def fleet(
    tmp_path: Path,
) -> AsyncIterator[tuple[Bootstrap, RecordingEngine, RecordingEngine, RecordingEngine, Rig]]:
    answers, host = Bootstrap(), own_host()
    async with (
        recording_engine(host, answers) as server,
        recording_engine(host, status(200, b"{}")) as prefill,
        recording_engine(own_host()) as decode,
    ):

        async def decoded(_: web.Request, received: Received) -> web.StreamResponse:
            if b"kv_transfer_params" in received.body:
                await prefill.wait_arrived()
            return web.Response(body=b"decoded")

        decode.answer = decoded
        pool = [row(prefill.host, prefill.port, rank=1)]
        flags = ("--mooncake-bootstrap-port", str(server.port))
        async with running(tmp_path, decode, *flags, pool=pool, connector="mooncake") as rig:
            rig.sidecar.health.now_s = lambda: 0.0
            yield answers, server, prefill, decode, rig


async def test_both_legs_name_one_transfer_and_the_prefillers_rank(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (_, server, prefill, decode, rig):
        transfers = set()
        for _n in range(3):
            assert (await rig.post(COMPLETIONS, BODY, **{PREFILL: prefill.address})).body == b"decoded"
            first, second = prefill.last.json["kv_transfer_params"], decode.last.json["kv_transfer_params"]
            transfer_id = first["transfer_id"]
            transfers.add(transfer_id)
            assert first == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
            assert second == {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "transfer_id": transfer_id,
                "remote_bootstrap_addr": f"http://{server.address}",
                "remote_engine_id": "one",
            }
            assert prefill.last.values("x-data-parallel-rank") == ["1"]
            assert prefill.last.json["max_tokens"] == 1
            assert decode.last.body.endswith(b"," + BODY[1:])
        assert len(transfers) == 3
        assert len(server.received) == 1, "asked once"


async def test_an_engine_that_was_started_again_is_asked_for_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (answers, server, prefill, decode, rig):
        await rig.post(COMPLETIONS, BODY, **{PREFILL: prefill.address})
        decoded = decode.answer

        async def waits(request: web.Request, received: Received) -> web.StreamResponse:
            if b"kv_transfer_params" in received.body:
                await asyncio.Event().wait()
            return await decoded(request, received)

        prefill.answer, decode.answer = status(500), waits
        assert (await rig.post(COMPLETIONS, BODY, **{PREFILL: prefill.address})).body == b"decoded"
        answers.document, prefill.answer = {"1": {"engine_id": "new"}}, status(200, b"{}")
        decode.answer = decoded
        prefill.arrived.clear()
        await rig.post(COMPLETIONS, BODY, **{PREFILL: prefill.address})
        assert decode.last.json["kv_transfer_params"]["remote_engine_id"] == "new"
        assert len(server.received) == 2


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"0": {"engine_id": "zero"}},
        {"1": {"engine_id": 7}},
        {"1": "one"},
        {"1": {"engine_id": "a\nb"}},
    ],
)
async def test_a_rank_without_an_engine_is_served_by_the_own_engine(tmp_path: Path, document: Any) -> None:
    """Never by another rank's id: two ranks are two engines."""
    async with fleet(tmp_path) as (answers, _, prefill, decode, rig):
        answers.document = document
        assert (await rig.post(COMPLETIONS, BODY, **{PREFILL: prefill.address})).body == b"decoded"
        assert (decode.last.body, prefill.received) == (BODY, [])
        assert rig.value("prefill_fallbacks_total", reason="garbage") == 1
