"""Connections of the metrics port that say nothing, in virtual time; the wiring is tried on a real socket."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import ClientSession, web

from sidecar.pages import Pages, _Watched
from tests.virtual_time import run_virtual

SILENCE_S = 60.0


class Handler(asyncio.Protocol):
    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


class Wire(asyncio.Transport):
    """A connection's transport that only knows whether it was cut, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.cut_s: float | None = None

    def abort(self) -> None:
        self.cut_s = asyncio.get_running_loop().time()


async def _speaking_at(*times_s: float) -> float | None:
    handler, wire = Handler(), Wire()
    watched = _Watched(handler, SILENCE_S)
    watched.connection_made(wire)
    for at_s in times_s:
        await asyncio.sleep(at_s - asyncio.get_running_loop().time())
        watched.data_received(b"G")
    await asyncio.sleep(10 * SILENCE_S)
    assert handler.heard == [b"G"] * len(times_s)
    return wire.cut_s


@pytest.mark.parametrize(
    ("times_s", "cut_s"),
    [((), 60.0), ((1.0,), 61.0), ((59.0, 118.0, 177.0), 237.0)],
    ids=["never a byte", "a byte and no more", "as long as it speaks it stays"],
)
def test_a_silent_connection_is_cut(times_s: tuple[float, ...], cut_s: float) -> None:
    assert run_virtual(_speaking_at(*times_s)) == cut_s


def test_a_connection_that_has_ended_leaves_no_timer() -> None:
    async def ended() -> float | None:
        handler, wire = Handler(), Wire()
        watched = _Watched(handler, SILENCE_S)
        watched.connection_made(wire)
        watched.connection_lost(None)
        assert handler.lost
        await asyncio.sleep(10 * SILENCE_S)
        return wire.cut_s

    assert run_virtual(ended()) is None


async def test_on_a_real_port() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="figures")

    app = web.Application()
    app.router.add_get("/metrics", page)
    pages = await Pages.start(app, "127.0.0.1", 0, silence_s=0.05)
    try:
        for said in (b"", b"GET /metrics HT"):
            await _until_cut(pages.port, said)
        async with (
            ClientSession() as session,
            session.get(f"http://127.0.0.1:{pages.port}/metrics") as answer,
        ):
            assert await answer.text() == "figures"
    finally:
        await pages.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", pages.port)


async def _until_cut(port: int, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    with contextlib.suppress(ConnectionResetError):  # by FIN or by RST: the kernel's concern
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    writer.close()
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()
