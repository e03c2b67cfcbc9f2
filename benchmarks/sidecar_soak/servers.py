"""Engines and prefill peers with the faults that a request's header asks for."""

from __future__ import annotations

import asyncio
import json
import random

from benchmarks.sidecar_soak.cases import PEER_HOST, answer_of


class FaultyServer:
    """An engine, or a peer's sidecar when `role` is `prefill`; obeys the header of each request."""

    def __init__(self, role: str, seed: int) -> None:
        self._role = role
        self._random = random.Random(seed)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # the last: closed under uvloop
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        body = await reader.readexactly(int(fields[b"content-length"]))
        number, engine, prefiller, stream = fields[b"x-case"].decode().split(".")
        fault = prefiller if self._role == "prefill" else engine
        raw = self._answer(int(number), fault, stream == "1", body)
        match fault:
            case "stall":
                await reader.read()
                return False
            case "reset":
                writer.write(raw[: self._random.randrange(len(raw))])
                await asyncio.sleep(0)
                writer.transport.abort()
                return False
            case "garbage":
                writer.write(self._random.randbytes(self._random.randrange(1, 300)) + b"\r\n\r\n")
                return False
            case "slow":
                for at in range(0, len(raw), 97):
                    writer.write(raw[at : at + 97])
                    await writer.drain()
                    await asyncio.sleep(self._random.random() / 500)
            case _:
                writer.write(raw)
                await writer.drain()
        return True

    def _answer(self, number: int, fault: str, stream: bool, body: bytes) -> bytes:
        if fault == "error":
            return _framed(b'{"object":"error"}', b"503 Busy", stream=False)
        if self._role == "prefill":
            params = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "e"}
            host = "10.9.9.9" if fault == "params" else PEER_HOST
            answer = {"kv_transfer_params": {**params, "remote_host": host, "remote_port": 5600}}
            return _framed(json.dumps(answer).encode(), stream=False)
        assert b'"prompt"' in body
        return _framed(answer_of(number, stream=stream), stream=stream)


def _framed(body: bytes, status: bytes = b"200 OK", *, stream: bool) -> bytes:
    if not stream:
        head = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"HTTP/1.1 " + status + b"\r\n" + head + body
    events = body.split(b"\n\n")[:-1]
    chunks = b"".join(b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event) for event in events)
    head = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return b"HTTP/1.1 " + status + b"\r\n" + head + chunks + b"0\r\n\r\n"
