"""The sglang connector (experimental): both legs meet in one room, which no client can choose."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from sidecar import wire
from tests.integration.sidecar.doubles import Received, RecordingEngine, recording_engine, status
from tests.integration.sidecar.rig import CHAT, Rig, own_host, row, running

PREFILL = wire.PREFILLER_HOST_PORT
_NAMES = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
BODY = b'{"messages":[],"temperature":1e0,"max_tokens":9,"stream":true}'


@asynccontextmanager
async def pair(tmp_path: Path) -> AsyncIterator[tuple[RecordingEngine, RecordingEngine, Rig]]:
    async with (
        recording_engine(own_host(), status(200, b"{}")) as prefill,
        recording_engine(own_host()) as decode,
    ):

        async def decoded(_: web.Request, __: Received) -> web.StreamResponse:
            await prefill.wait_arrived()
            return web.Response(body=b"decoded")

        decode.answer = decoded
        pool = [row(prefill.host, prefill.port)]
        async with running(
            tmp_path, decode, "--sglang-bootstrap-port=9001", pool=pool, connector="sglang"
        ) as rig:
            yield prefill, decode, rig


async def test_both_legs_name_the_prefillers_bootstrap_server_and_one_room(tmp_path: Path) -> None:
    rooms = set()
    async with pair(tmp_path) as (prefill, decode, rig):
        for _ in range(3):
            answer = await rig.post(CHAT, BODY, **{PREFILL: prefill.address})
            assert answer.body == b"decoded"
            first, second = ({name: leg.last.json[name] for name in _NAMES} for leg in (prefill, decode))
            assert first == second
            assert (first["bootstrap_host"], first["bootstrap_port"]) == (prefill.host, 9001)
            rooms.add(first["bootstrap_room"])
            assert decode.last.body.endswith(b"," + BODY[1:])
            assert (prefill.last.json["max_tokens"], prefill.last.json["stream"]) == (1, False)
            assert "kv_transfer_params" not in prefill.last.json
    assert len(rooms) == 3


async def test_a_clients_own_bootstrap_fields_are_not_heard(tmp_path: Path) -> None:
    hostile = {"messages": [], "bootstrap_host": "10.6.6.6", "bootstrap_port": 1, "bootstrap_room": 7}
    async with pair(tmp_path) as (prefill, decode, rig):
        await rig.post(CHAT, hostile, **{PREFILL: prefill.address})
        assert decode.last.json["bootstrap_host"] == prefill.host
        assert decode.last.body.count(b"bootstrap_room") == 1
        decode.answer = status(200)
        await rig.post(CHAT, json.dumps(hostile).replace("bootstrap_h", "boot\\u0073trap_h").encode())
        assert decode.last.json == {"messages": []}
        assert rig.value("client_params_removed_total") == 2


async def test_a_source_is_not_followed(tmp_path: Path) -> None:
    async with pair(tmp_path) as (prefill, decode, rig):
        decode.answer = status(200)
        await rig.post(CHAT, BODY, **{wire.KV_CACHE_SOURCE_HOST_PORT: prefill.address})
        assert decode.last.body == BODY
        assert rig.value("pulls_skipped_total", reason="pull_disabled") == 1
