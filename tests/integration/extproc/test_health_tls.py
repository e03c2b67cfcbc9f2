"""Health on both ports; certificates as a real TLS client sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.extproc import tls, wire
from epp.extproc.server import ExtProcServer, ServerSettings
from tests.integration.extproc import client
from tests.integration.extproc.handler import Bookkeeper

SETTINGS = ServerSettings(host="127.0.0.1", port=0, health_host="127.0.0.1", health_port=0, lame_duck_s=0.0)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Readiness:
    def __init__(self) -> None:
        self.ready = True

    def __call__(self) -> bool:
        return self.ready


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest_asyncio.fixture
async def server(readiness: Readiness) -> AsyncIterator[ExtProcServer]:
    server = ExtProcServer(Bookkeeper({"a": "10.0.0.1:1"}), ready=readiness, settings=SETTINGS)
    await server.start()
    yield server
    await server.stop()


async def check(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return int(answer.status)


@pytest.mark.parametrize("port", ["health", "ext-proc"])
async def test_names_follow_readiness_and_liveness_does_not(
    server: ExtProcServer, readiness: Readiness, port: str
) -> None:
    channel = (
        grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}")
        if port == "health"
        else await client.channel_to(server.port)
    )
    async with channel:
        for ready in (True, False):
            readiness.ready = ready
            for name in wire.HEALTH_SERVICES:
                expected = SERVING if ready or name == "liveness" else NOT_SERVING
                assert await check(channel, name) == expected
        readiness.ready = True
        server.health.drain()
        answers = {name: await check(channel, name) for name in wire.HEALTH_SERVICES}
        assert answers.pop("liveness") == SERVING
        assert set(answers.values()) == {NOT_SERVING}
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check(channel, "inference-extension")
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as watch:
            await watching.read()
        assert watch.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def _shown(port: int) -> x509.Certificate:
    pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
    return x509.load_pem_x509_certificate(pem.encode())


async def test_self_signed_without_a_mount(server: ExtProcServer) -> None:
    assert (await _shown(server.port)).subject.rfc4514_string() == "O=kvpull"


def put(directory: Path, pair: tls.KeyPair) -> None:
    for name, data in ((tls.CERTIFICATE_FILE, pair.certificate), (tls.KEY_FILE, pair.key)):
        fresh = directory / f".{name}"
        fresh.write_bytes(data)
        os.replace(fresh, directory / name)


@pytest.mark.parametrize("reload", [True, False])
async def test_a_mounted_certificate_is_reloaded(tmp_path: Path, reload: bool) -> None:
    first, second = tls.self_signed(("first", "localhost")), tls.self_signed(("second", "localhost"))
    put(tmp_path, first)
    settings = replace(SETTINGS, cert_path=tmp_path, cert_reload=reload)
    server = ExtProcServer(Bookkeeper({"a": "10.0.0.1:1"}), ready=lambda: True, settings=settings)
    await server.start()
    try:
        before = x509.load_pem_x509_certificate(first.certificate)
        after = x509.load_pem_x509_certificate(second.certificate)
        assert await _shown(server.port) == before
        put(tmp_path, tls.KeyPair(second.certificate, first.key))  # half-way: not used
        assert await _shown(server.port) == before
        put(tmp_path, second)
        assert await _shown(server.port) == (after if reload else before)
        async with await client.channel_to(server.port) as channel:
            assert await check(channel, "readiness") == SERVING
    finally:
        await server.stop()


async def test_a_bad_mount_stops_the_start(tmp_path: Path) -> None:
    settings = replace(SETTINGS, cert_path=tmp_path)
    server = ExtProcServer(Bookkeeper({"a": "10.0.0.1:1"}), ready=lambda: True, settings=settings)
    with pytest.raises(tls.CertificateError, match=r"tls\.crt"):
        await server.start()
    await server.stop()


@pytest.mark.parametrize("secure", [True, False], ids=["TLS", "plain"])
@pytest.mark.parametrize("said", [b"", b"PRI * HT"], ids=["nothing", "half a greeting"])
async def test_who_connects_and_does_not_speak_is_shut_out(secure: bool, said: bytes) -> None:
    settings = replace(SETTINGS, secure=secure, handshake_timeout_s=0.2)
    server = ExtProcServer(Bookkeeper({}), ready=lambda: True, settings=settings)
    await server.start()
    try:
        assert server.health_port is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}") as channel:
            assert await check(channel, "") == SERVING
            for port in (server.port, server.health_port):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                with contextlib.suppress(ConnectionResetError):
                    async with asyncio.timeout(10):
                        await reader.read()  # to the end
                writer.close()
                with contextlib.suppress(ConnectionResetError):
                    await writer.wait_closed()
            assert await check(channel, "") == SERVING, "who speaks stays"
    finally:
        await server.stop()
