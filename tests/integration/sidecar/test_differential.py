"""The engine with and without a sidecar in front: same request bytes in, same answer bytes out."""

from __future__ import annotations

import asyncio
import io
import itertools
import random
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sidecar.kv_params import Api
from tests.integration.sidecar.doubles import WAIT_S, Received
from tests.integration.sidecar.rig import PORT, proxied

# what a parser and a writer would change: number forms, escapes, spaces, order, duplicate keys
_MEMBERS = [b'"model" :"m"', b'"temperature":1e0', b'"top_p": 1.10', b'"seed":36893488147419103232']
_MEMBERS += [
    b'"prompt":"caf\\u00e9 \xc3\xa9 \\/ \\ud83d\\ude00"',
    b'"stop":[ ]',
    b'"seed":7',
    b'"x":{"y":-0.0}',
]
_OWN = b'"kv_transfer_params" : {"remote_kv_source":{"remote_host":"10.6.6.6","n":[1,{}]}}'
_ANSWERS = {
    "json": (b'{ "n":1e2, "usage":{"prompt_tokens":3} }', "application/json"),
    "events": (b'event: x\r\ndata: {"n":1.0}\r\n\r\n: note\n\ndata: [DONE]\n\n', "text/event-stream"),
    "empty": (b"", "application/json"),
}


@pytest.mark.parametrize("answer", _ANSWERS)
@pytest.mark.parametrize("api", Api)
async def test_bytes_outside_the_own_field_are_the_same(tmp_path: Path, api: Api, answer: str) -> None:
    body, content_type = _ANSWERS[answer]

    async def fixed(_: web.Request, __: Received) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Type": content_type, "X-Twice": "1"})

    async with proxied(tmp_path, fixed) as (engine, rig):
        for at in range(0, len(_MEMBERS) + 1, 4):
            with_field = b"{ " + b", ".join([*_MEMBERS[:at], _OWN, *_MEMBERS[at:]]) + b"\n}"
            without = b"{ " + b", ".join(_MEMBERS) + b"\n}"
            found = []
            for url, sent in (
                (f"http://{engine.address}{api.value}", without),
                (rig.url(api.value), with_field),
            ):
                headers = {"Content-Type": "application/json"}
                async with rig.session.post(url, data=io.BytesIO(sent), headers=headers) as got:
                    found.append((got.status, _plain(got), await got.read()))
            direct, proxied_answer = found
            assert proxied_answer == direct
            first, second = engine.received[-2:]
            assert first.body == without
            assert second.body == without, at
            assert second.values("content-length") == [str(len(without))]


def _plain(answer: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    """Headers without those that tell the time."""
    return sorted((name.lower(), value) for name, value in answer.headers.items() if name != "Date")


async def test_pipelined_and_cut_anywhere_the_bytes_are_the_same(tmp_path: Path) -> None:
    """All routes and answers in one write, or in pieces: the engine's answers in order, one connection."""

    async def chosen(request: web.Request, received: Received) -> web.StreamResponse:
        body, content_type = _ANSWERS[received.values("x-answer")[0]]
        if received.values("x-framing") == ["length"]:
            return web.Response(body=body, headers={"Content-Type": content_type})
        stream = web.StreamResponse(headers={"Content-Type": content_type})
        await stream.prepare(request)
        for n in range(len(body)):
            await stream.write(body[n : n + 1])
        return stream

    def request(api: Api, answer: str, framing: str, body: bytes) -> bytes:
        head = f"POST {api.value} HTTP/1.1\r\nHost: t\r\nX-Answer: {answer}\r\nX-Framing: {framing}\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    cases = list(itertools.product(Api, _ANSWERS, ("length", "chunked")))[:16]
    with_field = b"{" + b", ".join([*_MEMBERS, _OWN]) + b"}"
    without = b"{" + b", ".join(_MEMBERS) + b"}"
    chance = random.Random(5)
    async with proxied(tmp_path, chosen) as (engine, rig):
        direct = [await _answers(engine.host, engine.port, [request(*case, without)], 1) for case in cases]
        sent = b"".join(request(*case, with_field) for case in cases)
        for count in (0, 3, 40, len(sent) - 1):
            cuts = sorted(chance.sample(range(1, len(sent)), count))
            pieces = [sent[a:b] for a, b in itertools.pairwise([0, *cuts, len(sent)])]
            found = await _answers(rig.host, PORT, pieces, len(cases))
            assert found == [answer for (answer,) in direct], count
            assert {received.body for received in engine.received[-len(cases) :]} == {without}


async def _answers(host: str, port: int, pieces: list[bytes], count: int) -> list[tuple[bytes, bytes]]:
    """Status line and body of `count` answers on one connection."""
    reader, writer = await asyncio.open_connection(host, port)
    found = []
    try:
        async with asyncio.timeout(WAIT_S):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            for _ in range(count):
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(length)) if length else await _chunks(reader)
                found.append((head.split(b"\r\n")[0], body))
        assert not reader._buffer, "nothing but the answers"  # type: ignore[attr-defined]
    finally:
        writer.transport.abort()
    return found


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    assert await reader.readexactly(2) == b"\r\n"
    return body


async def test_positions_of_the_own_field(tmp_path: Path) -> None:
    """Negative control of the above: the field does reach the sidecar, and is counted."""
    async with proxied(tmp_path) as (engine, rig):
        for order in itertools.permutations((_OWN, b'"a":1e2', b'"b":1.10')):
            await rig.post(Api.CHAT.value, b"{" + b",".join(order) + b"}")
            assert b"kv_transfer_params" not in engine.last.body
            assert set(engine.last.body.strip(b"{}").split(b",")) == {b'"a":1e2', b'"b":1.10'}
        assert rig.value("client_params_removed_total") == 6
