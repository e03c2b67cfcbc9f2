"""A peer that has just failed is left alone, and no request is worse off for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar import wire
from tests.integration.sidecar.doubles import Answer, Received, RecordingEngine, recording_engine, status
from tests.integration.sidecar.rig import CHAT, COMPLETIONS, Rig, own_host, row, running

PREFILL, SOURCE = wire.PREFILLER_HOST_PORT, wire.KV_CACHE_SOURCE_HOST_PORT
_PEER = own_host()
_NAMED = {SOURCE: f"{_PEER}:8000"}


class _Clock:
    """Stands still until a test moves it."""

    def __init__(self, rig: Rig) -> None:
        self.now_s = 0.0
        rig.sidecar.health.now_s = lambda: self.now_s


@dataclass
class _Engine:
    """Says what a test tells it about its cache."""

    cached: Any = 0
    stream: bool = False

    async def __call__(self, _: web.Request, __: Received) -> web.StreamResponse:
        usage = {"usage": {"prompt_tokens": 99, "prompt_tokens_details": self.cached}}
        if not self.stream:
            return web.json_response(usage)
        text = b'data: {"n":1}\n\ndata: ' + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"
        return web.Response(body=text, content_type="text/event-stream")


def _tokens(count: Any) -> dict[str, Any]:
    return {"cached_tokens": count}


@asynccontextmanager
async def _aggregated(tmp_path: Path, told: _Engine) -> AsyncIterator[tuple[RecordingEngine, Rig, _Clock]]:
    async with (
        recording_engine(own_host(), told) as engine,
        running(tmp_path, engine, pool=[row(_PEER, 8000)]) as rig,
    ):
        yield engine, rig, _Clock(rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_source_that_gave_nothing_is_skipped_for_a_while(tmp_path: Path, stream: bool) -> None:
    async with _aggregated(tmp_path, _Engine(_tokens(0), stream)) as (engine, rig, clock):
        asked = []
        for now_s in (0.0, 0.5, 0.7, 1.5, 1.6):
            clock.now_s = now_s
            answer = await rig.post(CHAT, {"messages": []}, **_NAMED)
            assert answer.status == 200
            asked.append("kv_transfer_params" in engine.last.json)
        assert asked == [True, False, False, True, False]
        assert rig.value("pulls_skipped_total", reason="source_suspected") == 3
        assert rig.value("pulls_ended_total", leg="aggregated", outcome="nothing") == 2
        assert rig.value("suspected_total", part="source") == 2


async def test_a_pull_that_brought_something_clears_the_source(tmp_path: Path) -> None:
    told = _Engine(_tokens(0))
    async with _aggregated(tmp_path, told) as (engine, rig, clock):
        for cached, now_s in ((0, 0.0), (64, 1.5), (64, 1.6), (0, 1.7), (0, 3.3)):
            told.cached, clock.now_s = _tokens(cached), now_s
            await rig.post(COMPLETIONS, {"prompt": "p"}, **_NAMED)
            assert "kv_transfer_params" in engine.last.json, now_s
        assert rig.value("pull_cached_tokens_total", leg="aggregated") == 128


@pytest.mark.parametrize("details", [None, {}, _tokens(None), _tokens("0"), "text"])
async def test_unknown_is_not_remembered(tmp_path: Path, details: Any) -> None:
    async with _aggregated(tmp_path, _Engine(details)) as (engine, rig, _):
        for _n in range(3):
            await rig.post(COMPLETIONS, {"prompt": "p"}, **_NAMED)
            assert "kv_transfer_params" in engine.last.json
        assert rig.value("pulls_ended_total", leg="aggregated", outcome="unknown") == 3


async def test_an_error_says_nothing_about_the_source(tmp_path: Path) -> None:
    body = json.dumps({"usage": {"prompt_tokens_details": _tokens(0)}}).encode()
    async with (
        recording_engine(own_host(), status(429, body, Content_Type="application/json")) as engine,
        running(tmp_path, engine, pool=[row(_PEER, 8000)]) as rig,
    ):
        for _n in range(2):
            assert (await rig.post(COMPLETIONS, {"prompt": "p"}, **_NAMED)).body == body
            assert "kv_transfer_params" in engine.last.json


# --- prefillers -----------------------------------------------------------------------------------


async def _decoded(request: web.Request, received: Received) -> web.StreamResponse:
    return web.Response(body=b"decoded")


async def _serial_prefill(request: web.Request, _: Received) -> web.StreamResponse:
    assert request.transport is not None
    params = {"do_remote_prefill": True, "remote_block_ids": [], "remote_engine_id": "e", "remote_port": 1}
    host = request.transport.get_extra_info("sockname")[0]
    return web.json_response({"kv_transfer_params": {**params, "remote_host": host}})


@asynccontextmanager
async def _split(
    tmp_path: Path, prefill: Answer, *flags: str
) -> AsyncIterator[tuple[RecordingEngine, RecordingEngine, RecordingEngine, Rig, _Clock]]:
    async with (
        recording_engine(own_host(), prefill) as first,
        recording_engine(own_host(), _serial_prefill) as second,
        recording_engine(own_host(), _decoded) as decode,
    ):
        rows = [row(engine.host, engine.port) for engine in (first, second)]
        flags = ("--prefill-retry-backoff", "1ms", *flags)
        async with running(tmp_path, decode, *flags, pool=rows, connector="nixlv2") as rig:
            yield first, second, decode, rig, _Clock(rig)


async def test_a_dead_prefiller_is_asked_once_and_then_passed_over(tmp_path: Path) -> None:
    async with _split(tmp_path, status(503)) as (first, second, _, rig, clock):
        both = {PREFILL: f"{first.address},{second.address}"}
        for _n in range(5):
            assert (await rig.post(COMPLETIONS, {"prompt": "p"}, **both)).body == b"decoded"
        assert (len(first.received), len(second.received)) == (1, 5)
        first.answer, clock.now_s = _serial_prefill, 1.5
        for _n in range(2):
            await rig.post(COMPLETIONS, {"prompt": "p"}, **both)
        assert (len(first.received), len(second.received)) == (3, 5)


async def test_with_no_prefiller_left_the_own_engine_serves_at_once(tmp_path: Path) -> None:
    async with _split(tmp_path, status(503)) as (first, _, decode, rig, __):
        for _n in range(3):
            assert (
                await rig.post(COMPLETIONS, {"prompt": "p"}, **{PREFILL: first.address})
            ).body == b"decoded"
        assert (len(first.received), len(decode.received)) == (1, 3)
        assert rig.value("prefill_fallbacks_total", reason="status_5xx") == 1
        assert rig.value("prefill_fallbacks_total", reason="suspected") == 2


async def test_policy_error_asks_a_suspected_prefiller_all_the_same(tmp_path: Path) -> None:
    flags = ("--prefill-failure-policy", "error")
    async with _split(tmp_path, status(503, b"full"), *flags) as (first, _, decode, rig, __):
        for _n in range(2):
            answer = await rig.post(COMPLETIONS, {"prompt": "p"}, **{PREFILL: first.address})
            assert (answer.status, answer.body) == (503, b"full")
        assert (len(first.received), decode.received) == (2, [])


@pytest.mark.parametrize("code", [400, 413, 429, 500])
async def test_an_error_of_one_request_is_not_held_against_the_prefiller(tmp_path: Path, code: int) -> None:
    async with _split(tmp_path, status(code)) as (first, _, __, rig, ___):
        for _n in range(2):
            await rig.post(COMPLETIONS, {"prompt": "p"}, **{PREFILL: first.address})
        assert len(first.received) == 2


async def test_a_prefill_leg_skips_a_source_that_gave_it_nothing(tmp_path: Path) -> None:
    async def cold(request: web.Request, received: Received) -> web.StreamResponse:
        plain = await _serial_prefill(request, received)
        assert isinstance(plain, web.Response)
        assert plain.text is not None
        usage = {"usage": {"prompt_tokens_details": _tokens(0)}}
        return web.json_response({**json.loads(plain.text), **usage})

    async with _split(tmp_path, cold, "--enable-p2p-pull") as (first, second, _, rig, __):
        for pulls in (True, False):
            await rig.post(COMPLETIONS, {"prompt": "p"}, **{PREFILL: first.address, SOURCE: second.address})
            assert ("remote_kv_source" in first.last.json["kv_transfer_params"]) is pulls
        assert rig.value("pulls_ended_total", leg="prefill", outcome="nothing") == 1


# --- one deadline for the whole prefill phase -------------------------------------------------------


async def test_attempts_share_one_deadline(tmp_path: Path) -> None:
    """A second prefiller is not tried once the first has used up the time."""

    async def never(_request: web.Request, _: Received) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with _split(tmp_path, never, "--prefill-timeout", "100ms") as (first, second, _, rig, __):
        both = {PREFILL: f"{first.address},{second.address}"}
        assert (await rig.post(COMPLETIONS, {"prompt": "p"}, **both)).body == b"decoded"
        assert second.received == []
        assert rig.value("prefill_fallbacks_total", reason="timeout") == 1
