"""Idle connections: the youngest first, none that is too old, however many of those there are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.endpoint import HostPort
from sidecar.http.client import ClientConnection
from sidecar.http.pool import ConnectionPool

ENGINE = HostPort("127.0.0.1", 1)


class Transport(asyncio.Transport):
    """Counts as open until it is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


def transport_of(connection: ClientConnection) -> Transport:
    assert isinstance(connection.transport, Transport)
    return connection.transport


@pytest.fixture
async def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connect succeeds at once."""

    async def connect(
        make: Callable[[], ClientConnection], *_: Any, **__: Any
    ) -> tuple[None, ClientConnection]:
        connection = make()
        connection.connection_made(Transport())
        return None, connection

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)


def pool_of(most: int) -> ConnectionPool:
    return ConnectionPool(
        connect_timeout_s=5.0, idle_timeout_s=60.0, keepalive_s=60.0, max_idle_per_host=most
    )


async def test_the_youngest_is_taken_and_more_than_the_limit_are_not_kept(connections: None) -> None:
    pool = pool_of(2)
    opened = [await pool.open(ENGINE) for _ in range(3)]
    for connection in opened:
        pool.give_back(connection)
    assert [transport_of(c).aborted for c in opened] == [False, False, True]
    assert [pool.take(ENGINE) for _ in range(3)] == [opened[1], opened[0], None]
    await pool.close()


async def test_any_number_of_old_connections_is_passed_over(connections: None) -> None:
    """More of them than Python may call itself: after a pause the whole pool is old at once."""
    count = sys.getrecursionlimit() + 100
    pool = pool_of(count)
    opened = [await pool.open(ENGINE) for _ in range(count)]
    for connection in opened:
        connection.moved_s -= 61.0
        pool.give_back(connection)
    assert pool.take(ENGINE) is None
    assert all(transport_of(c).aborted for c in opened)
    await pool.close()
