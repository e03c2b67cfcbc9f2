"""One Envoy, one ext-proc server and two upstreams for the tests that need a real gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from epp.extproc.conformance import ConformanceHandler
from epp.extproc.conversations import RequestHandler
from epp.extproc.server import ExtProcServer, ServerSettings
from epp.extproc.service import Limits
from tests.integration.extproc import envoy
from tests.integration.extproc.handler import Bookkeeper
from tests.integration.extproc.upstream import Upstream

CLOSED = "127.0.0.1:1"  # nobody listens there


@dataclass
class Gateway:
    urls: dict[str, str]
    server: ExtProcServer
    upstreams: dict[str, Upstream]
    handler: Bookkeeper
    current: _Current

    def conform(self) -> None:
        """From now on, in this test, with the doubles of the conformance tests."""
        self.current.conforming = True


class _Current:
    """Lets every test have its own books behind the one running server."""

    def __init__(self) -> None:
        self.handler = Bookkeeper({})
        self.conforming = False
        self.decide = lambda head, body: self._now().decide(head, body)
        self.first_token = lambda token: self.handler.first_token(token)
        self.finished = lambda token, outcome: self.handler.finished(token, outcome)

    def _now(self) -> RequestHandler:
        return ConformanceHandler(self.handler) if self.conforming else self.handler


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Gateway, _Current]]:
    folder: Path = tmp_path_factory.mktemp("envoy")
    upstreams = {name: Upstream(name) for name in ("a", "b")}
    current = _Current()
    settings = ServerSettings(
        host="127.0.0.1",
        port=0,
        health_port=None,
        lame_duck_s=0.0,
        limits=Limits(),  # what is in force by default: 32 MiB
    )
    server = ExtProcServer(current, ready=lambda: True, settings=settings)
    await server.start()
    for upstream in upstreams.values():
        await upstream.start()
    try:
        hosts = [CLOSED, *(upstream.address for upstream in upstreams.values())]
        async with envoy.running(server.port, folder, hosts) as urls:
            yield Gateway(urls, server, upstreams, current.handler, current), current
    finally:
        await server.drain(10)
        await server.stop()
        for upstream in upstreams.values():
            await upstream.stop()
    assert server.stats.streams_open == 0
    assert server.stats.decisions_open == 0


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(fleet: tuple[Gateway, _Current]) -> AsyncIterator[Gateway]:
    gateway, current = fleet
    targets = {name: upstream.address for name, upstream in gateway.upstreams.items()}
    current.conforming = False
    gateway.handler = current.handler = Bookkeeper({**targets, "closed": CLOSED})
    for upstream in gateway.upstreams.values():
        upstream.bodies.clear()
        upstream.headers.clear()
        upstream.hold = None
    yield gateway
    handler = gateway.handler
    await handler.until(lambda: handler.finished_tokens.total() == handler.decided)
    handler.assert_books_balance()
