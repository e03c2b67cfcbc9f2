"""Prefill/decode: what each leg carries, in which order, and what happens when one fails."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar import wire
from sidecar.endpoint_file import parse_endpoint_rows
from tests.integration.sidecar.doubles import Answer, Received, RecordingEngine, recording_engine, status
from tests.integration.sidecar.rig import CHAT, COMPLETIONS, Rig, own_host, row, running

PREFILL, SOURCE = wire.PREFILLER_HOST_PORT, wire.KV_CACHE_SOURCE_HOST_PORT
BODY = (
    b'{"model":"m", "prompt":"p","max_tokens":77,"stream":true,"stream_options":{"include_usage":true},"n":2}'
)


def _nixl(host: str) -> dict[str, Any]:
    """What an engine at `host` answers to a nixlv2 prefill leg; fields of later versions included."""
    ids = {"remote_block_ids": [[4, 5]], "remote_engine_id": "e", "remote_request_id": "r"}
    return {"do_remote_prefill": True, **ids, "remote_host": host, "remote_port": 5600, "new": {"x": None}}


@dataclass
class Pair:
    """A prefill engine, a decode engine and the decode side's sidecar."""

    prefill: RecordingEngine
    decode: RecordingEngine
    rig: Rig
    peer: str  # a third pool member
    concurrent: bool  # both legs at once

    async def post(self, body: Any = BODY, path: str = COMPLETIONS, **headers: str) -> Any:
        return await self.rig.post(path, body, **{PREFILL: self.prefill.address, **headers})


async def _decoded(_: web.Request, __: Received) -> web.StreamResponse:
    return web.Response(body=b"data: decoded\n\n", content_type="text/event-stream")


async def _prefilled(request: web.Request, _: Received) -> web.StreamResponse:
    assert request.transport is not None
    host = request.transport.get_extra_info("sockname")[0]
    return web.json_response({"kv_transfer_params": _nixl(host)})


@asynccontextmanager
async def pair(
    tmp_path: Path, *flags: str, connector: str = "offloading", host: str | None = None
) -> AsyncIterator[Pair]:
    peer = own_host()
    async with (
        recording_engine(own_host(), _prefilled) as prefill,
        recording_engine(own_host(), _decoded) as decode,
    ):
        pool = [row(prefill.host, prefill.port, p2p_port=7801), row(peer, 8000, p2p_port=7803)]
        async with running(tmp_path, decode, *flags, pool=pool, connector=connector, host=host) as rig:
            yield Pair(prefill, decode, rig, f"{peer}:8000", connector == "offloading")


def _one_token(**params: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": "p",
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": params,
    }


def _source(peer: str, kv_request_id: str) -> dict[str, Any]:
    host = peer.split(":")[0]
    return {"remote_kv_source": {"kv_request_id": kv_request_id, "remote_host": host, "remote_port": 7803}}


# --- offloading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_source", [False, True])
async def test_offloading_legs(tmp_path: Path, with_source: bool) -> None:
    decision_id = str(uuid.uuid4())
    async with pair(tmp_path) as p:
        headers = {wire.DECISION_ID: decision_id, wire.REQUEST_ID: "req-1"}
        headers |= {SOURCE: p.peer} if with_source else {}
        answer = await p.post(**headers)
    assert (answer.status, answer.body) == (200, b"data: decoded\n\n")
    source = _source(p.peer, decision_id) if with_source else {}
    assert p.prefill.last.json == _one_token(remote_decoder={"kv_request_id": decision_id}, **source)
    params = {"kv_request_id": decision_id, "remote_host": p.prefill.host, "remote_port": 7801}
    spliced = (
        b'{"kv_transfer_params":' + json.dumps({"remote_prefiller": params}, separators=(",", ":")).encode()
    )
    assert p.decode.last.body == spliced + b"," + BODY[1:]
    for leg in (p.prefill.last, p.decode.last):
        assert leg.values(wire.REQUEST_ID) == ["req-1"]
        assert leg.values("content-length") == [str(len(leg.body))]
    assert not any(p.decode.last.values(name) for name in wire.ROUTING_HEADERS)
    assert p.prefill.last.values(wire.LEG) == [wire.LEG_PREFILL]
    assert p.prefill.last.peer_host == p.rig.host, "the peer recognises us by our address"


async def test_offloading_legs_run_at_once(tmp_path: Path) -> None:
    """Each leg is answered only when the other has arrived."""
    async with pair(tmp_path) as p:

        async def decode(request: web.Request, received: Received) -> web.StreamResponse:
            await p.prefill.wait_arrived()
            return await _decoded(request, received)

        async def prefill(request: web.Request, received: Received) -> web.StreamResponse:
            await p.decode.wait_arrived()
            return await _prefilled(request, received)

        p.decode.answer, p.prefill.answer = decode, prefill
        assert (await p.post()).body == b"data: decoded\n\n"


async def test_an_answering_decode_leg_does_not_wait_for_the_prefill_answer(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        p.prefill.answer = _never
        assert (await p.post()).body == b"data: decoded\n\n"
        await p.prefill.wait_cancelled()


async def test_a_prefiller_is_not_its_own_source(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        await p.post(**{SOURCE: p.prefill.address})
        assert "remote_kv_source" not in p.prefill.last.json["kv_transfer_params"]
        assert p.rig.value("pulls_skipped_total", reason="source_is_computing") == 1


# --- nixlv2 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pull", [False, True])
async def test_nixlv2_legs(tmp_path: Path, pull: bool) -> None:
    flags = ("--enable-p2p-pull",) if pull else ()
    async with pair(tmp_path, *flags, connector="nixlv2") as p:
        answer = await p.post(**{SOURCE: p.peer, wire.REQUEST_ID: "req-1"}, Accept_Encoding="gzip")
    assert answer.body == b"data: decoded\n\n"
    sent = p.prefill.last.json
    kv_request_id = sent["kv_transfer_params"].get("remote_kv_source", {}).get("kv_request_id", "")
    assert sent == _one_token(
        do_remote_decode=True,
        do_remote_prefill=False,
        remote_engine_id=None,
        remote_block_ids=None,
        remote_host=None,
        remote_port=None,
        **(_source(p.peer, kv_request_id) if pull else {}),
    )
    assert p.decode.last.json == {"kv_transfer_params": _nixl(p.prefill.host), **json.loads(BODY)}
    assert p.decode.last.values(wire.REQUEST_ID) == ["req-1"]
    (own_id,) = p.prefill.last.values(wire.REQUEST_ID)
    assert uuid.UUID(own_id).version == 4
    assert p.prefill.last.values("accept-encoding") == []
    assert p.decode.last.values("accept-encoding") == [], "its usage may have to be corrected"


async def test_nixlv2_without_params_in_the_answer_is_a_failed_prefill(tmp_path: Path) -> None:
    async with pair(tmp_path, connector="nixlv2") as p:
        p.prefill.answer = status(200, b"{}")
        assert (await p.post()).body == b"data: decoded\n\n"
        assert p.decode.last.body == BODY
        assert p.rig.value("prefill_fallbacks_total", reason="garbage") == 1


@pytest.mark.parametrize("policy", ["local", "error"])
async def test_nixlv2_params_that_name_a_stranger_are_a_failed_prefill(tmp_path: Path, policy: str) -> None:
    """The own engine must not be sent to an address outside the pool by a peer's answer."""
    params = _nixl("169.254.169.254")
    async with pair(tmp_path, "--prefill-failure-policy", policy, connector="nixlv2") as p:
        p.prefill.answer = status(200, json.dumps({"kv_transfer_params": params}).encode())
        answer = await p.post()
        if policy == "local":
            assert (answer.body, p.decode.last.body) == (b"data: decoded\n\n", BODY)
            assert p.rig.value("prefill_fallbacks_total", reason="params_invalid") == 1
        else:
            assert (answer.status, p.decode.received) == (502, [])
            assert "169.254" not in answer.json["message"]


# --- failures -------------------------------------------------------------------------------------


async def _never(_: web.Request, __: Received) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _waits_for_kv(request: web.Request, received: Received) -> web.StreamResponse:
    """A decode engine: with a prefiller named it waits for blocks that never come."""
    if "kv_transfer_params" in received.json:
        return await _never(request, received)
    return await _decoded(request, received)


async def _headers_then_waits(request: web.Request, received: Received) -> web.StreamResponse:
    """As real engines do when streaming: the status at once, the first byte after the blocks."""
    if "kv_transfer_params" not in received.json:
        return await _decoded(request, received)
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    await asyncio.Event().wait()
    return answer


def _once_both_run(p: Pair, answer: Answer) -> Answer:
    """A prefill answer given while the decode leg is certainly waiting."""

    async def wait(request: web.Request, received: Received) -> web.StreamResponse:
        if p.concurrent:
            await p.decode.wait_arrived()
        return await answer(request, received)

    return wait


@pytest.mark.parametrize("decode", [_waits_for_kv, _headers_then_waits])
@pytest.mark.parametrize("code", [400, 429, 500, 503])
async def test_a_failed_prefill_is_repaired_by_the_own_engine(
    tmp_path: Path, code: int, decode: Answer
) -> None:
    async with pair(tmp_path) as p:
        p.prefill.answer, p.decode.answer = _once_both_run(p, status(code, b"no")), decode
        answer = await p.post()
        assert (answer.status, answer.body) == (200, b"data: decoded\n\n")
        await p.decode.wait_cancelled()
        assert p.decode.last.body == BODY
        assert p.rig.value("prefill_fallbacks_total", reason=f"status_{code // 100}xx") == 1


@pytest.mark.parametrize("code", [408, 413, 422, 429, 499, 500, 504])
@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_policy_error_gives_the_prefills_own_answer(tmp_path: Path, code: int, connector: str) -> None:
    async with pair(tmp_path, "--prefill-failure-policy", "error", connector=connector) as p:
        refusal = status(code, b"why not", Retry_After="3")
        p.prefill.answer, p.decode.answer = _once_both_run(p, refusal), _waits_for_kv
        answer = await p.post()
        assert (answer.status, answer.body, answer.headers["Retry-After"]) == (code, b"why not", "3")
        if p.concurrent:
            await p.decode.wait_cancelled()
        else:
            assert p.decode.received == []


@pytest.mark.parametrize(("policy", "code"), [("local", 200), ("error", 503)])
@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_a_prefiller_that_is_gone(tmp_path: Path, policy: str, code: int, connector: str) -> None:
    async with pair(tmp_path, "--prefill-failure-policy", policy, connector=connector) as p:
        p.decode.answer = _waits_for_kv
        async with recording_engine(own_host()) as gone:
            address = gone.address
        _replace_pool(p.rig, row(gone.host, gone.port))
        answer = await p.rig.post(COMPLETIONS, BODY, **{PREFILL: address})
        assert answer.status == code
        if code == 503:
            assert answer.json["object"] == "error"
            assert "prefill" in answer.json["message"]


async def test_a_prefill_leg_has_a_deadline(tmp_path: Path) -> None:
    async with pair(tmp_path, "--prefill-timeout", "100ms", connector="nixlv2") as p:
        p.prefill.answer = _never
        assert (await p.post()).body == b"data: decoded\n\n"
        await p.prefill.wait_cancelled()
        assert p.rig.value("prefill_fallbacks_total", reason="timeout") == 1


@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_another_attempt_if_allowed(tmp_path: Path, connector: str) -> None:
    flags = ("--prefill-max-retries", "2", "--prefill-retry-backoff", "1ms")
    async with pair(tmp_path, *flags, connector=connector) as p:
        failures = [503, 502]

        async def third_time(request: web.Request, received: Received) -> web.StreamResponse:
            return await (status(failures.pop()) if failures else _prefilled)(request, received)

        async def after_prefill(request: web.Request, received: Received) -> web.StreamResponse:
            if len(p.prefill.received) < 3:
                return await _never(request, received)
            return await _decoded(request, received)

        p.prefill.answer, p.decode.answer = third_time, after_prefill
        assert (await p.post()).body == b"data: decoded\n\n"
        assert "kv_transfer_params" in p.decode.last.json
        assert len(p.prefill.received) == 3
        assert p.rig.value("retries_total", kind="prefill") == 2


async def test_the_next_prefiller_of_a_list_is_tried(tmp_path: Path) -> None:
    async with pair(tmp_path, "--prefill-retry-backoff", "1ms") as p, recording_engine(own_host()) as other:
        _replace_pool(p.rig, row(p.prefill.host, p.prefill.port), row(other.host, other.port, p2p_port=7805))
        other.answer, p.prefill.answer = _prefilled, status(503)

        async def wants_other(request: web.Request, received: Received) -> web.StreamResponse:
            named = received.json["kv_transfer_params"]["remote_prefiller"]
            return await (_decoded if named["remote_host"] == other.host else _never)(request, received)

        p.decode.answer = wants_other
        answer = await p.rig.post(COMPLETIONS, BODY, **{PREFILL: f"{p.prefill.address},{other.address}"})
        assert answer.body == b"data: decoded\n\n"
        assert p.decode.last.json["kv_transfer_params"]["remote_prefiller"]["remote_port"] == 7805


@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_a_decode_error_reaches_the_client_as_it_was(tmp_path: Path, connector: str) -> None:
    async with pair(tmp_path, connector=connector) as p:
        p.decode.answer = status(400, b"too long", X_Why="length")
        answer = await p.post()
        assert (answer.status, answer.body, answer.headers["X-Why"]) == (400, b"too long", "length")


@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_a_client_that_leaves_cancels_the_legs(tmp_path: Path, connector: str) -> None:
    async with pair(tmp_path, connector=connector) as p:
        p.prefill.answer = p.decode.answer = _never
        request = asyncio.create_task(p.post())
        await p.prefill.wait_arrived()
        if p.concurrent:
            await p.decode.wait_arrived()
        request.cancel()
        await p.prefill.wait_cancelled()
        if p.concurrent:
            await p.decode.wait_cancelled()
        assert len(p.decode.received) == (1 if p.concurrent else 0)


# --- what is not split ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["10.6.6.6:80", "nonsense"])
async def test_a_prefiller_outside_the_pool_is_403(tmp_path: Path, value: str) -> None:
    async with pair(tmp_path) as p:
        answer = await p.post(**{PREFILL: value})
        assert (answer.status, answer.json["code"], answer.json["object"]) == (403, 403, "error")
        assert p.decode.received == p.prefill.received == []


async def test_another_port_of_a_pool_member_is_403(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, recording_engine(p.prefill.host) as same_host:
        assert (await p.post(**{PREFILL: same_host.address})).status == 403
        assert same_host.received == []


@pytest.mark.parametrize("extra", [{"prompt_logprobs": 5}, {"echo": True, "logprobs": 1}])
async def test_requests_that_need_the_prompt_stay_on_one_engine(
    tmp_path: Path, extra: dict[str, Any]
) -> None:
    body = {"prompt": "p", **extra}
    async with pair(tmp_path) as p:
        await p.post(body)
        assert p.prefill.received == []
        assert p.decode.last.json == body


async def test_both_token_limits_of_chat_are_one_and_restored(tmp_path: Path) -> None:
    body = {"messages": [], "max_completion_tokens": 500, "min_tokens": 3}
    async with pair(tmp_path) as p:
        await p.post(body, CHAT)
        sent = p.prefill.last.json
        assert (sent["max_completion_tokens"], sent["max_tokens"], sent["min_tokens"]) == (1, 1, 1)
        decoded = p.decode.last.json
        del decoded["kv_transfer_params"]
        assert decoded == body


def _replace_pool(rig: Rig, *rows: dict[str, Any]) -> None:
    text = json.dumps({"endpoints": rows}).encode()
    rig.sidecar.allow_list.replace(parse_endpoint_rows(text, "test"))
