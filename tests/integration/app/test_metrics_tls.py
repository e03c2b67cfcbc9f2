"""The picker's metrics port behind TLS, in a process: who is served, reload, the operators' commands."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509

from epp import cli
from tests.integration.app.test_picker_process import TOKEN, Picker, picker_process
from tests.integration.engine.rig import BOUND_S
from tests.integration.siblings.certificates import Authority, put

ROW = {"pod": "engine-a", "host": "127.0.0.1", "serving_port": 1, "metrics_port": 1}


@dataclass
class Secured:
    """A picker that shows `tls.crt` of `mounted`, and wants clients of the authority in `clients/ca.crt`."""

    picker: Picker
    servers: Authority
    mounted: Path
    clients: Path

    @property
    def port(self) -> int:
        return self.picker.ports["metrics_port"]

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def trusting(self, client: Path | None = None) -> ssl.SSLContext:
        """A client that verifies the picker and shows `client`'s certificate."""
        context = ssl.create_default_context(cafile=str(self.mounted / "ca.crt"))
        if client is not None:
            context.load_cert_chain(client / "tls.crt", client / "tls.key")
        return context

    async def page(self, context: ssl.SSLContext) -> str:
        """/metrics over a new connection."""
        connector = aiohttp.TCPConnector(ssl=context, force_close=True)
        timeout = aiohttp.ClientTimeout(total=BOUND_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.get(self.url + "/metrics") as answer,
        ):
            assert answer.status == 200
            return await answer.text()

    async def refuses(self, context: ssl.SSLContext) -> None:
        with pytest.raises(aiohttp.ClientError):
            await self.page(context)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    servers, monitors = Authority("servers"), Authority("monitors")
    mounted = servers.issue(tmp_path / "mounted")
    clients = monitors.issue(tmp_path / "clients", "prometheus")
    inputs = ("--endpoints-file", str(tmp_path / "endpoints.json"), "--metrics-cert-dir", str(mounted))
    inputs += ("--metrics-client-ca-file", str(clients / "ca.crt"))
    async with picker_process(tmp_path, [ROW], inputs=inputs) as picker:
        yield Secured(picker, servers, mounted, clients)


async def shown(secured: Secured) -> int:
    """Serial number of the certificate that a new connection gets."""
    async with asyncio.timeout(BOUND_S):
        context = secured.trusting(secured.clients)
        _, writer = await asyncio.open_connection("127.0.0.1", secured.port, ssl=context)
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        await writer.wait_closed()
    return x509.load_der_x509_certificate(der).serial_number


async def test_only_clients_of_the_authority_are_served(secured: Secured, tmp_path: Path) -> None:
    page = await secured.page(secured.trusting(secured.clients))
    assert "kvpull_epp_kv_event_age_seconds" in page
    await secured.refuses(secured.trusting())  # nothing shown
    stranger = Authority("strangers").issue(tmp_path / "stranger")
    await secured.refuses(secured.trusting(stranger))
    await secured.refuses(secured.trusting(secured.mounted))  # the picker's own is not a monitor's
    await secured.refuses(ssl.create_default_context())  # a client that does not know the picker
    async with aiohttp.ClientSession() as session:  # plain HTTP is no way around it
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{secured.port}/metrics")
    old = secured.trusting(secured.clients)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    await secured.refuses(old)  # its sessions could be taken up again after the authority has changed
    assert "kvpull_epp_kv_event_age_seconds" in await secured.page(secured.trusting(secured.clients))


async def test_certificate_and_authority_are_reloaded(secured: Secured, tmp_path: Path) -> None:
    """A client that was served before is not, once its authority is gone."""
    first = secured.trusting(secured.clients)
    await secured.page(first)
    before = await shown(secured)
    secured.servers.issue(secured.mounted)
    assert await shown(secured) != before
    other = Authority("other monitors").issue(tmp_path / "other", "prometheus")
    await secured.refuses(secured.trusting(other))
    put(secured.clients, "ca.crt", (other / "ca.crt").read_bytes())
    assert "kvpull_epp_kv_event_age_seconds" in await secured.page(secured.trusting(other))
    await secured.refuses(first)
    put(secured.clients, "ca.crt", b"nonsense")
    assert await secured.page(secured.trusting(other)), "the last good authority stays"
    await secured.refuses(first)


async def test_the_operators_commands_speak_it(
    secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "debug-token").write_text(TOKEN)
    asked = ("--url", secured.url, "--token-file", str(tmp_path / "debug-token"), "--json")
    trusted = (*asked, "--ca-file", str(secured.mounted / "ca.crt"))

    async def kvpull(*arguments: str) -> tuple[int, str]:
        status = await asyncio.to_thread(cli.main, arguments)
        said = capsys.readouterr()
        return status, said.out + said.err

    shown_by = ("--client-cert-dir", str(secured.clients))
    status, said = await kvpull("thresholds", "show", *trusted, *shown_by)
    assert (status, said.count('"active": false')) == (0, 1), said
    status, said = await kvpull("doctor", *trusted, *shown_by, "--passive", "--settle", "0")
    assert "engine-a" in said
    for arguments, fault in ((trusted, "certificate"), ((*asked, *shown_by), "certificate verify failed")):
        status, said = await kvpull("thresholds", "show", *arguments)
        assert (status, fault in said.lower()) == (3, True), said
    status, said = await kvpull("thresholds", "show", *trusted, "--client-cert-dir", str(tmp_path))
    assert (status, "--client-cert-dir: " in said, "tls.crt: No such file" in said) == (2, True, True), said
    (tmp_path / "bad.pem").write_text("nonsense")
    status, said = await kvpull("thresholds", "show", *asked, "--ca-file", str(tmp_path / "bad.pem"))
    assert (status, "bad.pem: no PEM certificate" in said) == (2, True), said
