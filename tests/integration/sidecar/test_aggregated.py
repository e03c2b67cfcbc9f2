"""Requests for the own engine: what is rewritten, what passes byte for byte, what is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from sidecar import wire
from tests.integration.sidecar.doubles import Received, echo, recording_engine, status
from tests.integration.sidecar.rig import (
    CHAT,
    COMPLETIONS,
    PORT,
    own_host,
    proxied,
    raw_exchange,
    raw_post,
    row,
    running,
)

PEER = own_host()
SOURCE = wire.KV_CACHE_SOURCE_HOST_PORT
POOL = [row(PEER, 8000, p2p_port=7790)]
BODY = b'{ "model":"m",\n "prompt":"caf\\u00e9 \xc3\xa9", "seed": 1e2, "max_tokens":5 }'


async def test_a_source_becomes_the_engines_remote_kv_source(tmp_path: Path) -> None:
    decision_id = str(uuid.uuid4())
    async with proxied(tmp_path, pool=POOL) as (engine, rig):
        headers = {SOURCE: f"{PEER}:8000", wire.DECISION_ID: decision_id, wire.REQUEST_ID: "req-1"}
        answer = await rig.post(COMPLETIONS, BODY, **headers)
        pulls = rig.value("pulls_requested_total", leg="aggregated")
    assert answer.status == 200
    sent = engine.last
    params = {"remote_kv_source": {"kv_request_id": decision_id, "remote_host": PEER, "remote_port": 7790}}
    assert sent.json == {"kv_transfer_params": params, **json.loads(BODY)}
    assert sent.values("content-length") == [str(len(sent.body))]
    assert sent.values(wire.REQUEST_ID) == ["req-1"]
    assert not any(sent.values(name) for name in wire.ROUTING_HEADERS)
    assert pulls == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (f"{PEER}:22", "not_allowed"),
        ("169.254.169.254:80", "not_allowed"),
        ("nonsense", "malformed"),
        ("self", "source_is_computing"),
    ],
)
async def test_a_source_that_cannot_be_used_leaves_the_request_as_it_is(
    tmp_path: Path, source: str, reason: str
) -> None:
    host = own_host()
    pool = [*POOL, row(host, PORT)]
    async with proxied(tmp_path, host=host, pool=pool) as (engine, rig):
        named = f"{host}:{PORT}" if source == "self" else source
        answer = await rig.post(COMPLETIONS, BODY, **{SOURCE: named})
        assert answer.body == engine.last.body == BODY
        assert rig.value("pulls_skipped_total", reason=reason) == 1
        assert rig.value("routing_headers_dropped_total", header=SOURCE, reason=reason) == 1
    assert not engine.last.values(SOURCE)


async def test_a_pulls_port_follows_the_file(tmp_path: Path) -> None:
    async with proxied(tmp_path, pool=POOL) as (engine, rig):
        rig.sidecar.allow_list.replace(())
        await rig.post(COMPLETIONS, BODY, **{SOURCE: f"{PEER}:8000"})
        assert engine.last.body == BODY


async def test_client_params_never_reach_the_engine(tmp_path: Path) -> None:
    hostile = b'{"prompt":"p","kv_transfer\\u005fparams":{"remote_kv_source":{"remote_host":"10.6.6.6"}}}'
    async with proxied(tmp_path, pool=POOL) as (engine, rig):
        for path in (COMPLETIONS, "/invocations", "/v1/%63ompletions", "/v1/completions/"):
            await rig.post(path, hostile)
            assert engine.last.json == {"prompt": "p"}, path
            assert engine.last.target == path
        await rig.post(CHAT, hostile, **{SOURCE: f"{PEER}:8000"})
        assert engine.last.json["kv_transfer_params"]["remote_kv_source"]["remote_host"] == PEER
        assert rig.value("client_params_removed_total") == 5


async def test_a_large_hostile_body_is_cleaned_while_others_are_served(tmp_path: Path) -> None:
    """Nobody else waits for the seconds that a body of a million tiny members takes."""
    members = b",".join(b'"a%d":{}' % n for n in range(100_000))
    hostile = b'{"kv_transfer_params":{},' + members + b"}"
    async with proxied(tmp_path, pool=POOL) as (engine, rig):
        large = asyncio.create_task(rig.post(COMPLETIONS, hostile))
        quick = 0
        while not large.done():
            assert (await rig.post(COMPLETIONS, b"{}")).body == b"{}"
            quick += 1
        assert (await large).body == b"{" + members + b"}"
        assert quick > 1
        assert len(engine.received) == quick + 1


async def test_a_client_cannot_pass_for_a_peers_leg(tmp_path: Path) -> None:
    body = {"prompt": "p", "kv_transfer_params": {"remote_decoder": {"kv_request_id": "x"}}}
    async with proxied(tmp_path, pool=POOL) as (engine, rig):
        await rig.post(COMPLETIONS, body, **{wire.LEG: wire.LEG_PREFILL})
        assert engine.last.json == {"prompt": "p"}
        assert not engine.last.values(wire.LEG)


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD"])
async def test_everything_else_passes_through(tmp_path: Path, method: str) -> None:
    target = "/v1/models/a%2Fb//c/../d?x=%20+&y=%zz&x=2&e="
    async with proxied(tmp_path, status(200, b"ok", X_Engine="1")) as (engine, rig):
        head = f"{method} {target} HTTP/1.1\r\nHost: pool.example:8080\r\nConnection: close\r\n\r\n"
        answer = await raw_exchange(rig.host, head.encode())
    assert (engine.last.method, engine.last.target) == (method, target)
    assert engine.last.values("host") == ["pool.example:8080"]
    assert b"HTTP/1.1 200 OK\r\n" in answer
    assert b"X-Engine: 1" in answer
    assert answer.endswith(b"\r\n\r\n" if method == "HEAD" else b"\r\n\r\nok")
    assert b"Content-Length: 2\r\n" in answer


async def test_headers_reach_the_engine_as_they_were(tmp_path: Path) -> None:
    lines = (
        "X-Twice: 1",
        "Accept: a/b",
        "X-Twice: 2",
        "Cookie: k=v",
        "Authorization: Bearer t",
        "TE: trailers",
    )
    async with proxied(tmp_path) as (engine, rig):
        await raw_exchange(
            rig.host, raw_post(COMPLETIONS, b"{}", *lines, "Keep-Alive: timeout=5", "X-N: \xe9")
        )
    sent = engine.last
    assert sent.values("x-twice") == ["1", "2"]
    assert sent.values("cookie") == ["k=v"]
    assert sent.values("authorization") == ["Bearer t"]
    assert sent.values("accept") == ["a/b"]
    for absent in ("te", "keep-alive", "user-agent", "accept-encoding", "transfer-encoding"):
        assert sent.values(absent) == [], absent


async def test_an_answers_headers_are_exactly_the_engines(tmp_path: Path) -> None:
    async def two_cookies(_: web.Request, __: Received) -> web.StreamResponse:
        answer = web.Response(status=201, reason="Made", body=b"x")
        answer.headers.extend([("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("Keep-Alive", "timeout=5")])
        return answer

    async with proxied(tmp_path, two_cookies) as (_, rig), rig.session.get(rig.url("/x")) as answer:
        assert (answer.status, answer.reason) == (201, "Made")
        assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        assert "Keep-Alive" not in answer.headers
        assert len(answer.headers.getall("Date")) == 1
        assert len(answer.headers.getall("Server")) == 1


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_a_packed_answer_stays_packed(tmp_path: Path, encoding: str) -> None:
    packed = gzip.compress(b"hello " * 100) if encoding == "gzip" else b"\x0b\x02\x80hello\x03"
    answer = status(200, packed, Content_Encoding=encoding)
    async with proxied(tmp_path, answer) as (engine, rig):
        found = await rig.post(COMPLETIONS, BODY, Accept_Encoding=encoding)
    assert found.body == packed
    assert found.headers["Content-Encoding"] == encoding
    assert found.headers["Content-Length"] == str(len(packed))
    assert engine.last.values("accept-encoding") == [encoding]


@pytest.mark.parametrize("code", [204, 304])
async def test_answers_without_a_body(tmp_path: Path, code: int) -> None:
    async with proxied(tmp_path, status(code, ETag='"v"')) as (_, rig):
        head = b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
        answer = await raw_exchange(rig.host, head)
    assert answer.startswith(f"HTTP/1.1 {code} ".encode())
    assert b'\r\netag: "v"\r\n' in answer.lower()
    assert answer.endswith(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in answer


@pytest.mark.parametrize("code", [400, 401, 404, 422, 429, 500, 503])
async def test_an_engines_error_reaches_the_client_as_it_was(tmp_path: Path, code: int) -> None:
    body = b'{"object":"error","message":"m","code":%d}' % code
    answer = status(code, body, Retry_After="7", X_Reason="r")
    async with proxied(tmp_path, answer, pool=POOL) as (_, rig):
        found = await rig.post(COMPLETIONS, BODY, **{SOURCE: f"{PEER}:8000"})
    assert (found.status, found.body) == (code, body)
    assert (found.headers["Retry-After"], found.headers["X-Reason"]) == ("7", "r")


async def test_a_body_that_is_not_json_is_streamed_and_unlimited(tmp_path: Path) -> None:
    audio = bytes(range(256)) * 8192
    async with proxied(tmp_path, echo, "--max-body-bytes", "1000") as (engine, rig):
        content_type = "multipart/form-data; boundary=b"
        answer = await rig.post("/v1/audio/transcriptions", audio, Content_Type=content_type)
    assert answer.body == engine.last.body == audio
    assert engine.last.values("content-length") == [str(len(audio))]


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
async def test_a_held_body_is_bounded(tmp_path: Path, chunked: bool) -> None:
    async with proxied(tmp_path, echo, "--max-body-bytes", "1000") as (engine, rig):
        fits = await rig.post(COMPLETIONS, b'"' + b"x" * 998 + b'"')
        assert (fits.status, len(engine.received)) == (200, 1)
        body = b"x" * 1001

        async def pieces() -> AsyncIterator[bytes]:
            yield body

        data = pieces() if chunked else body
        async with rig.session.post(rig.url(COMPLETIONS), data=data) as answer:
            assert answer.status == 413
            assert (await answer.json())["code"] == 413
    assert len(engine.received) == 1


@pytest.mark.parametrize("size_bytes", [1 << 20, (1 << 20) + 1, 5 << 20])
async def test_large_bodies_and_answers(tmp_path: Path, size_bytes: int) -> None:
    body = json.dumps({"prompt": "x" * size_bytes}).encode()
    async with proxied(tmp_path, pool=POOL) as (engine, rig):
        answer = await rig.post(COMPLETIONS, body, **{SOURCE: f"{PEER}:8000"})
    assert answer.body == engine.last.body
    assert engine.last.json["prompt"] == "x" * size_bytes


async def test_a_body_in_a_thousand_pieces_is_put_together_in_order(tmp_path: Path) -> None:
    parts = [b"%d," % n for n in range(1000)]

    async def pieces() -> AsyncIterator[bytes]:
        for part in (b"[", *parts, b"0]"):
            yield part

    async with proxied(tmp_path) as (engine, rig), rig.session.post(rig.url(CHAT), data=pieces()) as answer:
        assert answer.status == 200
        assert engine.last.body == b"".join((b"[", *parts, b"0]"))


async def test_a_compressed_request_is_refused_where_it_has_to_be_read(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig):
        answer = await rig.post(COMPLETIONS, gzip.compress(BODY), Content_Encoding="gzip")
        assert answer.status == 415
        assert engine.received == []


async def test_a_body_that_hides_params_and_is_not_json_is_400(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (engine, rig):
        answer = await rig.post(COMPLETIONS, b'{"kv_transfer_params":')
        assert (answer.status, answer.json["object"], engine.received) == (400, "error", [])


async def test_other_bad_json_is_the_engines_business(tmp_path: Path) -> None:
    async with proxied(tmp_path, status(400, b"engine says no"), pool=POOL) as (engine, rig):
        answer = await rig.post(COMPLETIONS, b"[1, 2", **{SOURCE: f"{PEER}:8000"})
        assert rig.value("pulls_skipped_total", reason="body_not_object") == 1
    assert (answer.status, answer.body, engine.last.body) == (400, b"engine says no", b"[1, 2")


async def test_the_own_health_is_not_the_engines(tmp_path: Path) -> None:
    async with proxied(tmp_path, status(500)) as (engine, rig):
        async with rig.session.get(rig.url("/health")) as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        assert engine.received == []
        async with rig.session.get(rig.url("/metrics")) as answer:
            assert answer.status == 500
    assert [received.target for received in engine.received] == ["/metrics"]


async def test_ranks_have_their_own_ports_and_engines(tmp_path: Path) -> None:
    engine_host = own_host()
    async with (
        recording_engine(engine_host) as rank_0,
        recording_engine(engine_host, port=rank_0.port + 1) as rank_1,
        running(tmp_path, rank_0, "--data-parallel-size", "2") as rig,
    ):
        rank_1_url = f"http://{rig.host}:{PORT + 1}/v1/completions"
        async with rig.session.post(rank_1_url, data=b"{}") as answer:
            assert answer.status == 200
        assert (len(rank_0.received), len(rank_1.received)) == (0, 1)
        await rig.post(COMPLETIONS, b"{}", **{wire.DATA_PARALLEL_HOST_PORT: f"{rig.host}:{PORT + 1}"})
        assert (len(rank_0.received), len(rank_1.received)) == (0, 2)
