"""Failures that were reported in public and that no other file here covers (docs/sidecar.md has the list)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sidecar import wire
from tests.integration.sidecar.doubles import (
    WAIT_S,
    RawEngine,
    Received,
    raw_engine,
    recording_engine,
)
from tests.integration.sidecar.emulated import BLOCK, emulated, loopback_nixl, prompt_ids
from tests.integration.sidecar.rig import (
    COMPLETIONS,
    PORT,
    own_host,
    raw_exchange,
    raw_post,
    row,
    running,
    until,
)

PREFILL = wire.PREFILLER_HOST_PORT
_EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True, scope="module")
def _nixl() -> Iterator[None]:
    with loopback_nixl():
        yield


async def _prefilled(request: web.Request, _: Received) -> web.StreamResponse:
    assert request.transport is not None
    host = request.transport.get_extra_info("sockname")[0]
    ids = {"do_remote_prefill": True, "remote_block_ids": [], "remote_engine_id": "e"}
    return web.json_response({"kv_transfer_params": {**ids, "remote_host": host, "remote_port": 1}})


@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
@pytest.mark.parametrize(
    ("sent", "code"),
    [(b"", 502), (_EVENTS, 502), (_EVENTS + b"5\r\ndata:\r\n", 200)],
    ids=["nothing", "head only", "first byte"],
)
async def test_f04_f13_a_decode_leg_that_dies(tmp_path: Path, connector: str, sent: bytes, code: int) -> None:
    """Exactly one answer is started, whenever it dies, and a begun one never looks complete."""

    async def dies(engine: RawEngine, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        out.write(sent)
        await out.drain()

    async with recording_engine(own_host(), _prefilled) as prefill, raw_engine(own_host(), dies) as decode:
        pool = [row(prefill.host, prefill.port)]
        async with running(tmp_path, decode, pool=pool, connector=connector) as rig:
            request = raw_post(COMPLETIONS, b'{"prompt":"p"}', f"{PREFILL}: {prefill.address}")
            answer = await raw_exchange(rig.host, request)
    if sent == _EVENTS and connector == "nixlv2":
        code = 200  # the head had gone on when the engine died
    assert answer.startswith(b"HTTP/1.1 %d " % code)
    assert answer.count(b"HTTP/1.1") == 1
    if code == 200:
        assert not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_f08_a_client_that_leaves_frees_the_prefill_engine(tmp_path: Path, connector: str) -> None:
    """The cancellation goes through two sidecars, and the next request is not behind dead work."""

    async def never(_: web.Request, received: Received) -> web.StreamResponse:
        if b"long" in received.body:
            await asyncio.Event().wait()
        return web.json_response({})

    peer_host, host = own_host(), own_host()
    pool = [row(peer_host, PORT), row(host, PORT)]
    async with (
        recording_engine(own_host(), never) as prefill,
        recording_engine(own_host(), never) as decode,
        running(tmp_path, prefill, host=peer_host, pool=pool, connector=connector) as peer,
        running(tmp_path, decode, host=host, pool=pool, connector=connector) as rig,
    ):
        call = asyncio.create_task(rig.post(COMPLETIONS, {"prompt": "long"}, **{PREFILL: peer.address}))
        await prefill.wait_arrived()
        assert prefill.last.json["kv_transfer_params"], "the peer's sidecar believes the leg"
        call.cancel()
        await prefill.wait_cancelled()
        await until(lambda: peer.value("active_requests") == rig.value("active_requests") == 0)
        assert (await peer.post(COMPLETIONS, {"prompt": "short"})).status == 200


async def test_f15_the_first_request_of_a_pair_with_a_late_prefill_leg(tmp_path: Path) -> None:
    """The reader asks before the writer has heard of the request; it waits, and gets every block."""
    prompt = prompt_ids(20 * BLOCK + 3)
    async with emulated() as prefill, emulated() as decode, aiohttp.ClientSession() as session:

        async def late(request: web.Request, received: Received) -> web.StreamResponse:
            await until(lambda: prefill.transport.stats.lookups == 1)
            url, headers = f"http://{prefill.address}{request.path}", {wire.REQUEST_ID: "leg"}
            headers["Content-Type"] = "application/json"
            async with session.post(url, data=received.body, headers=headers) as answer:
                return web.Response(body=await answer.read(), content_type="application/json")

        async with recording_engine(prefill.host, late) as slow:
            pool = [row(slow.host, slow.port, p2p_port=prefill.row["p2p_port"])]
            async with running(tmp_path, decode, pool=pool) as rig:
                body = {"model": "m", "prompt": prompt, "max_tokens": 3}
                answer = await rig.post(COMPLETIONS, body, **{PREFILL: slow.address, wire.REQUEST_ID: "one"})
        assert answer.status == 200
        report = decode.report("one")
        assert (report.handed_over_tokens, report.computed_tokens) == (20 * BLOCK, 3)
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_e08_e09_a_source_that_is_frozen_costs_one_request(tmp_path: Path) -> None:
    """A peer that accepts and never answers: the engine recomputes; the next request does not ask it."""
    accepted = asyncio.Semaphore(0)

    async def mute(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.release()
        await _reader.read()
        writer.close()

    peer = own_host()
    server = await asyncio.start_server(mute, peer, 0)
    prompt = prompt_ids(10 * BLOCK + 3)
    async with server, emulated(pull_base_s=0.2, pull_max_s=0.2) as engine:
        pool = [row(peer, 8000, p2p_port=server.sockets[0].getsockname()[1])]
        async with running(tmp_path, engine, pool=pool) as rig:
            rig.sidecar.health.now_s = lambda: 0.0
            for name in ("first", "second"):
                headers = {wire.KV_CACHE_SOURCE_HOST_PORT: f"{peer}:8000", wire.REQUEST_ID: name}
                body = {"model": "m", "prompt": prompt, "max_tokens": 3}
                assert (await rig.post(COMPLETIONS, body, **headers)).status == 200
            assert engine.report("first").computed_tokens == len(prompt)
            assert engine.report("first").pull_reason not in (None, "ok")
            assert engine.report("second").source is None, "not asked again"
            assert rig.value("pulls_skipped_total", reason="source_suspected") == 1
    async with asyncio.timeout(WAIT_S):
        await accepted.acquire()


async def test_h08_a_fallback_is_a_warning_once_and_a_counter_always(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with recording_engine(own_host()) as decode:
        dead = own_host()
        flags = ("--prefill-retry-backoff", "1ms")
        async with running(tmp_path, decode, *flags, pool=[row(dead, 1)], connector="nixlv2") as rig:
            for _ in range(20):
                assert (await rig.post(COMPLETIONS, {"prompt": "p"}, **{PREFILL: f"{dead}:1"})).status == 200
            reasons = ("unreachable", "suspected")
            counted = sum(rig.value("prefill_fallbacks_total", reason=reason) for reason in reasons)
    assert counted == 20
    assert sum("served by the own engine alone" in record.message for record in caplog.records) == 1
    assert json.dumps([record.getMessage() for record in caplog.records]).count("prompt") == 0


@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_h03_a_salt_reaches_every_leg_as_it_was(tmp_path: Path, connector: str) -> None:
    """Whoever may read a block is decided by the salt: no leg may lose it, no metric may have it."""
    salted = b'{"prompt":"p","cache_salt":"caf\\u00e9 tenant-7"}'
    async with (
        recording_engine(own_host(), _prefilled) as prefill,
        recording_engine(own_host()) as decode,
        running(
            tmp_path,
            decode,
            "--metrics-port",
            "8100",
            pool=[row(prefill.host, prefill.port)],
            connector=connector,
        ) as rig,
    ):
        await rig.post(COMPLETIONS, salted, **{PREFILL: prefill.address})
        await until(lambda: len(prefill.received) == 1)
        salts = [prefill.last.json["cache_salt"], decode.last.json["cache_salt"]]
        assert salts == ["caf\u00e9 tenant-7"] * 2
        assert b'"cache_salt":"caf\\u00e9 tenant-7"' in decode.last.body, (
            "the decode leg has the client's bytes"
        )
        if connector == "offloading":
            await rig.post(COMPLETIONS, salted, **{wire.KV_CACHE_SOURCE_HOST_PORT: prefill.address})
            assert "remote_kv_source" in decode.last.json["kv_transfer_params"]
            assert decode.last.json["cache_salt"] == salts[0]
        async with rig.session.get(f"http://{rig.host}:8100/metrics") as page:
            assert "tenant-7" not in await page.text()
