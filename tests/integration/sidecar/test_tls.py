"""TLS on every hop, with real certificates that change on disk."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sidecar import wire
from tests.integration.sidecar.doubles import WAIT_S, Received, recording_engine
from tests.integration.sidecar.rig import COMPLETIONS, PORT, Rig, own_host, row, running

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Authority:
    """Issues certificates for addresses; `path` is its own certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    path: Path

    @classmethod
    def create(cls, directory: Path) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _builder("authority", "authority", key).sign(key, hashes.SHA256())
        path = directory / "authority.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return cls(key, certificate, path)

    def issue(self, directory: Path, host: str) -> int:
        """`tls.crt` and `tls.key` for one address; returns the serial number."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        issued = (
            _builder("leaf", "authority", key).add_extension(address, False).sign(self.key, hashes.SHA256())
        )
        directory.mkdir(exist_ok=True)
        for name, data in (
            ("tls.crt", issued.public_bytes(serialization.Encoding.PEM)),
            (
                "tls.key",
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                ),
            ),
        ):
            fresh = directory / f"{name}.new"
            fresh.write_bytes(data)
            fresh.replace(directory / name)
        return issued.serial_number

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.path))


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), True)
    )


async def _serial(rig: Rig, context: ssl.SSLContext, port: int = PORT) -> int:
    """Of the certificate that a new connection is shown; the handshake verifies it."""
    async with asyncio.timeout(WAIT_S):
        _, writer = await asyncio.open_connection(rig.host, port, ssl=context, server_hostname=rig.host)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


async def test_the_serving_port_takes_a_new_certificate_and_keeps_connections(tmp_path: Path) -> None:
    authority, mounted, host = Authority.create(tmp_path), tmp_path / "mounted", own_host()
    first = authority.issue(mounted, host)
    context = authority.trusting()
    async with (
        recording_engine(own_host()) as engine,
        running(tmp_path, engine, "--secure-proxy", "--cert-path", str(mounted), host=host) as rig,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=1)) as session,
    ):
        async with session.post(f"https://{rig.address}{COMPLETIONS}", data=b'{"a":1}') as answer:
            assert await answer.read() == b'{"a":1}'
        assert await _serial(rig, context) == first
        second = authority.issue(mounted, host)
        assert await _serial(rig, context) == second
        (mounted / "tls.key").write_text("nonsense")
        assert await _serial(rig, context) == second, "the last good pair stays"
        async with session.post(f"https://{rig.address}{COMPLETIONS}", data=b'{"b":1}') as answer:
            assert await answer.read() == b'{"b":1}', "the connection from before goes on"
        assert len(engine.received) == 2


async def test_without_a_certificate_it_is_self_signed_and_never_plain(tmp_path: Path) -> None:
    async with recording_engine(own_host()) as engine, running(tmp_path, engine, "--secure-proxy") as rig:
        async with rig.session.post(f"https://{rig.address}{COMPLETIONS}", data=b"{}", ssl=False) as answer:
            assert (answer.status, await answer.read()) == (200, b"{}")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await rig.session.post(f"https://{rig.address}{COMPLETIONS}", data=b"{}")
        with pytest.raises((aiohttp.ClientConnectionError, ConnectionError)):
            await rig.session.post(f"http://{rig.address}{COMPLETIONS}", data=b"{}")
        assert len(engine.received) == 1


@pytest.mark.parametrize(
    ("flags", "trusted", "code"),
    [
        ((), True, 200),
        ((), False, 503),
        (("--tls-insecure-skip-verify", "prefiller"), False, 200),
    ],
    ids=["verified", "stranger", "not verified"],
)
async def test_the_prefill_leg_to_a_peers_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], trusted: bool, code: int
) -> None:
    """Two sidecars: the peer's serves with a certificate, ours verifies it unless told not to."""
    authority, peer_host = Authority.create(tmp_path), own_host()
    authority.issue(tmp_path / "mounted", peer_host)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path) if trusted else "/dev/null")
    host = own_host()
    pool = [row(peer_host, PORT), row(host, PORT)]
    peer_flags = ("--secure-proxy", "--cert-path", str(tmp_path / "mounted"))

    async def prefilled(_: web.Request, __: Received) -> web.StreamResponse:
        ids = {"do_remote_prefill": True, "remote_block_ids": [], "remote_engine_id": "e"}
        return web.json_response({"kv_transfer_params": {**ids, "remote_host": peer_host, "remote_port": 1}})

    own_flags = ("--enable-tls=prefiller", "--prefill-failure-policy=error", *flags)
    async with (
        recording_engine(own_host(), prefilled) as prefill,
        recording_engine(own_host()) as decode,
        running(tmp_path, prefill, *peer_flags, host=peer_host, pool=pool, connector="nixlv2"),
        running(tmp_path, decode, *own_flags, host=host, pool=pool, connector="nixlv2") as rig,
    ):
        answer = await rig.post(
            COMPLETIONS, {"prompt": "p"}, **{wire.PREFILLER_HOST_PORT: f"{peer_host}:{PORT}"}
        )
        assert answer.status == code
        if code == 200:
            assert prefill.last.json["kv_transfer_params"]["do_remote_decode"] is True
            assert answer.json["kv_transfer_params"]["remote_host"] == peer_host
        else:
            assert prefill.received == decode.received == []


@dataclass(frozen=True, slots=True)
class Secured:
    """An engine that speaks TLS only, and ends its connection after each answer."""

    host: str
    port: int


@asynccontextmanager
async def secured_engine(authority: Authority, directory: Path) -> AsyncIterator[Secured]:
    host = own_host()
    authority.issue(directory, host)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        answered = web.Response(body=await request.read())
        answered.force_close()
        return answered

    app.router.add_post(COMPLETIONS, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0, ssl_context=context)
        await site.start()
        yield Secured(host, site.port)
    finally:
        await runner.cleanup()


async def test_the_own_engine_over_tls(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    async with secured_engine(authority, tmp_path / "engine") as engine:
        flags = ("--enable-tls=decoder", "--tls-insecure-skip-verify=decoder")
        async with running(tmp_path, engine, *flags) as rig:
            assert (await rig.post(COMPLETIONS, b'{"x":1}')).body == b'{"x":1}'
        async with running(tmp_path, engine, "--enable-tls=decoder") as rig:
            assert (await rig.post(COMPLETIONS, b"{}")).status == 503, "not signed by a known authority"


async def test_new_trusted_roots_are_taken_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle that cannot be read changes nothing; one without the authority ends its trust."""
    authority, bundle = Authority.create(tmp_path), tmp_path / "bundle.pem"
    trusted = await asyncio.to_thread(authority.path.read_bytes)
    other = await asyncio.to_thread(lambda: Authority.create(tmp_path).path.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))

    def exchange(text: bytes) -> None:
        fresh = tmp_path / "fresh.pem"
        fresh.write_bytes(text)
        fresh.replace(bundle)

    await asyncio.to_thread(exchange, other)
    async with (
        secured_engine(authority, tmp_path / "engine") as engine,
        running(tmp_path, engine, "--enable-tls=decoder") as rig,
    ):
        for text, code in ((None, 503), (trusted, 200), (b"nonsense", 200), (other, 503), (trusted, 200)):
            if text is not None:
                await asyncio.to_thread(exchange, text)
            assert (await rig.post(COMPLETIONS, b"{}")).status == code


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    """Slow loris: half a request head does not hold a connection for ever."""
    async with (
        recording_engine(own_host()) as engine,
        running(tmp_path, engine, "--head-timeout", "50ms") as rig,
    ):
        reader, writer = await asyncio.open_connection(rig.host, PORT)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()
        assert engine.received == []


async def test_the_metrics_port_has_a_certificate_of_its_own(tmp_path: Path) -> None:
    """Reloaded. Plain HTTP and whoever does not trust it get nothing; the serving port stays as it was."""
    authority, mounted, host = Authority.create(tmp_path), tmp_path / "mounted", own_host()
    first = authority.issue(mounted, host)
    flags = ("--metrics-port", str(PORT + 1), "--metrics-cert-dir", str(mounted))
    address, context = f"{host}:{PORT + 1}", authority.trusting()
    async with (
        recording_engine(own_host()) as engine,
        running(tmp_path, engine, *flags, host=host) as rig,
        rig.session.get(f"https://{address}/metrics", ssl=context) as page,
    ):
        assert "kvpull_sidecar_active_requests 0.0" in await page.text()
        assert (await rig.post(COMPLETIONS, {"a": 1})).json == {"a": 1}
        assert await _serial(rig, context, PORT + 1) == first
        second = authority.issue(mounted, host)
        assert await _serial(rig, context, PORT + 1) == second
        with pytest.raises(aiohttp.ClientSSLError):
            await rig.session.get(f"https://{address}/metrics")
        with pytest.raises(aiohttp.ClientError):
            await rig.session.get(f"http://{address}/metrics")
