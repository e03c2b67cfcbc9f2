"""S-F12: cached tokens mean the same in every mode, on the wire and on emulated engines."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar import wire
from sidecar.kv_params import Api
from tests.integration.sidecar.doubles import Received, recording_engine
from tests.integration.sidecar.emulated import BLOCK, emulated, loopback_nixl, prompt_ids
from tests.integration.sidecar.rig import CHAT, COMPLETIONS, Rig, own_host, row, running

PREFILL, SOURCE = wire.PREFILLER_HOST_PORT, wire.KV_CACHE_SOURCE_HOST_PORT
_NIXL = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "e", "remote_port": 5600}


def _usage(api: Api, cached: int) -> dict[str, Any]:
    if api is Api.MESSAGES:
        return {"usage": {"input_tokens": 100 - cached, "cache_read_input_tokens": cached}}
    details = "input_tokens_details" if api is Api.RESPONSES else "prompt_tokens_details"
    return {"usage": {"prompt_tokens": 100, details: {"cached_tokens": cached}}}


def _events(api: Api, cached: int) -> bytes:
    last: dict[str, Any] = {"choices": [], **_usage(api, cached)}
    if api is Api.RESPONSES:
        last = {"type": "response.completed", "response": _usage(api, cached)}
    if api is Api.MESSAGES:
        last = {"type": "message_start", "message": _usage(api, cached)}
    return b"".join(
        b"event: x\ndata: %b\n\n" % text for text in (b'{"n":1e0}', json.dumps(last).encode(), b"[DONE]")
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
@pytest.mark.parametrize("api", Api)
async def test_every_shape_in_every_connector(tmp_path: Path, api: Api, connector: str, stream: bool) -> None:
    """The decode engine calls 96 tokens cached, of which the prefill leg has computed 64."""

    async def prefill(_: web.Request, __: Received) -> web.StreamResponse:
        return web.json_response({**_usage(api, 32), "kv_transfer_params": {**_NIXL, "remote_host": host}})

    async def decode(_: web.Request, __: Received) -> web.StreamResponse:
        if stream:
            return web.Response(body=_events(api, 96), content_type="text/event-stream")
        return web.json_response({"n": 1, **_usage(api, 96)})

    async with recording_engine(own_host(), prefill) as p, recording_engine(own_host(), decode) as d:
        host, pool = p.host, [row(p.host, p.port)]
        async with running(tmp_path, d, pool=pool, connector=connector) as rig:
            answer = await rig.post(api.value, {"prompt": "p", "stream": stream}, **{PREFILL: p.address})
            assert rig.value("usage_corrections_total") == 1
            alone = await rig.post(api.value, {"prompt": "p", "stream": stream})
    expected = _events(api, 32) if stream else json.dumps({"n": 1, **_usage(api, 32)}).encode()
    assert answer.body == expected
    if not stream:
        assert answer.headers["Content-Length"] == str(len(expected))
    assert alone.body == (_events(api, 96) if stream else json.dumps({"n": 1, **_usage(api, 96)}).encode())


async def test_a_stream_is_not_held_back_by_a_prefill_leg_that_has_not_answered(tmp_path: Path) -> None:
    """Every event up to the usage passes while the prefill leg is silent; the usage then claims nothing."""
    go_on = asyncio.Event()

    async def prefill(_: web.Request, __: Received) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def decode(request: web.Request, _: Received) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await go_on.wait()
        await answer.write(_events(Api.CHAT, 96))
        return answer

    async with recording_engine(own_host(), prefill) as p, recording_engine(own_host(), decode) as d:
        async with (
            running(tmp_path, d, pool=[row(p.host, p.port)]) as rig,
            rig.session.post(rig.url(CHAT), data=b'{"stream":true}', headers={PREFILL: p.address}) as answer,
        ):
            assert await answer.content.readexactly(9) == b"data: 1\n\n"
            go_on.set()
            assert await answer.content.read() == _events(Api.CHAT, 0)
        await p.wait_cancelled()


# --- emulated engines -----------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _nixl() -> Iterator[None]:
    with loopback_nixl():
        yield


async def _cached(rig: Rig, body: dict[str, Any], **headers: str) -> int:
    """`cached_tokens` as the client sees them, whole and streamed alike."""
    answer = await rig.post(COMPLETIONS, body, **headers)
    assert answer.status == 200, answer.body
    if not body.get("stream"):
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    *_, last, done = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
    assert done == b"[DONE]"
    return int(json.loads(last)["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_cold_warm_and_pulled(tmp_path: Path, connector: str, stream: bool) -> None:
    """Cold: 0, though the decode engine got all of it; warm: what the prefiller had; pulled: what came."""
    blocks = 20
    prompt = prompt_ids(blocks * BLOCK + 3)
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    flags = ("--enable-p2p-pull",) if connector == "nixlv2" else ()
    async with emulated() as prefill, emulated() as decode, emulated() as fresh:
        pool = [prefill.row, decode.row, fresh.row]
        async with (
            running(tmp_path, decode, *flags, pool=pool, connector=connector) as rig,
            running(tmp_path, fresh, *flags, pool=pool, connector=connector) as other,
        ):
            split = {PREFILL: prefill.address}
            assert await _cached(rig, body, **split) == 0
            assert await _cached(rig, body, **split) == blocks * BLOCK
            assert await _cached(rig, body) == blocks * BLOCK
            ids = {SOURCE: prefill.address, wire.DECISION_ID: str(uuid.uuid4()), wire.REQUEST_ID: "pulled"}
            assert await _cached(other, body, **ids) == blocks * BLOCK
            assert fresh.report("pulled").pulled_tokens == blocks * BLOCK
