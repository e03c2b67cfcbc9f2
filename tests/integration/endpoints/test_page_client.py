"""One kept connection against real sockets: every framing, faults at any byte, TLS, and a dead connection."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epp.endpoints.page_client import PageAddress, PageClient, ScrapeError
from sidecar.certificates import self_signed

from .conftest import BOUND_S

BODY = b"vllm:num_requests_waiting 1.0\n" * 500 + b"0\r\n\r\n"  # ends as chunks end
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


def chunked(*sizes: int) -> bytes:
    parts, at = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"], 0
    for size in (*sizes, len(BODY)):
        part = BODY[at : at + size]
        at += size
        if part:
            parts.append(b"%x;ext=1\r\n%b\r\n" % (len(part), part))
    return b"".join((*parts, b"0\r\n\r\n"))


class Server:
    """Answers every request with the next of `answers`, cut at `cuts`; None: closes instead."""

    def __init__(
        self, answers: Sequence[bytes | None], cuts: Sequence[int] = (), *, close: bool = False
    ) -> None:
        self.answers = list(answers)
        self.cuts = cuts
        self.close = close
        self.connections = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                if answer is None:
                    return
                edges = [0, *self.cuts, len(answer)]
                for start, end in itertools.pairwise(edges):
                    writer.write(answer[start:end])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def client_of(
    server: Server,
    *,
    tls: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | None = None,
    limit: int = 1 << 20,
) -> AsyncIterator[PageClient]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    address = PageAddress("127.0.0.1", listening.sockets[0].getsockname()[1], "/metrics", trust)
    client = PageClient(address, timeout_s=BOUND_S, max_page_bytes=limit)
    try:
        yield client
    finally:
        client.close()
        listening.close()
        await listening.wait_closed()


@pytest.mark.parametrize("answer", [LENGTH, chunked(), chunked(1, 7, 100), chunked(len(BODY) - 5)])
@pytest.mark.parametrize("cuts", [(), (1,), (40,), (60, 61, 62), tuple(range(1, 200))])
async def test_every_framing_at_every_cut_over_one_connection(answer: bytes, cuts: Sequence[int]) -> None:
    server = Server([answer] * 3, cuts)
    async with client_of(server) as client:
        for _ in range(3):
            assert await client.get() == BODY
    assert server.connections == 1
    assert server.requests[0].startswith(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize("end", [len(LENGTH), -5, -1])
async def test_chunks_that_end_late(end: int) -> None:
    server = Server([chunked(100)] * 2, [len(chunked(100)) + end if end < 0 else 30])
    async with client_of(server) as client:
        assert [await client.get(), await client.get()] == [BODY, BODY]


async def test_a_page_that_ends_with_its_connection() -> None:
    server = Server([b"HTTP/1.0 200 OK\r\n\r\n" + BODY] * 2, close=True)
    async with client_of(server) as client:
        assert [await client.get(), await client.get()] == [BODY, BODY]
    assert server.connections == 2


async def test_a_kept_connection_that_died_costs_one_more_try_and_no_failure() -> None:
    server = Server([LENGTH, None, LENGTH])
    async with client_of(server) as client:
        assert [await client.get(), await client.get()] == [BODY, BODY]
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "protocol"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "status_5xx"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n", "status_3xx"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "protocol"),
        (b"x" * 40_000, "protocol"),
        (LENGTH[:-3], "protocol"),
        (chunked()[:-3], "protocol"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a size at all\r\n0\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "page_size"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"y" * 200_000, "page_size"),
    ],
)
async def test_a_fault_has_a_stable_reason_and_the_next_try_is_fresh(
    answer: bytes | None, reason: str
) -> None:
    server = Server([answer, LENGTH], close=True)
    async with client_of(server, limit=1 << 17) as client:
        with pytest.raises(ScrapeError, match=f"^{reason}$"):
            await client.get()
        assert await client.get() == BODY


async def test_nobody_listens() -> None:
    client = PageClient(PageAddress("127.0.0.1", 1, "/metrics"), timeout_s=BOUND_S, max_page_bytes=1 << 20)
    with pytest.raises(ScrapeError, match=r"^connect$"):
        await client.get()


async def test_a_hung_engine_is_a_timeout() -> None:
    server = Server([LENGTH[:100]], close=False)
    async with client_of(server) as client:
        client._timeout_s = 0.05
        with pytest.raises(ScrapeError, match=r"^timeout$"):
            await client.get()


async def test_https_verified_and_not(tmp_path: Path) -> None:
    pair = self_signed(("localhost", "127.0.0.1"))
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    server = Server([LENGTH, LENGTH])
    async with client_of(server, tls=tls, trust=blind) as client:
        assert [await client.get(), await client.get()] == [BODY, BODY]
    assert server.connections == 1
    async with client_of(Server([LENGTH]), tls=tls, trust=ssl.create_default_context()) as client:
        with pytest.raises(ScrapeError, match=r"^tls$"):
            await client.get()
