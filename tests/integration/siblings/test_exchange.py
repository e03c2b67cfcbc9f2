"""A snapshot over real sockets and real TLS: what arrives, and who is let in."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from epp.core.errors import ConfigError
from epp.siblings import wire
from epp.siblings.client import SiblingAddress, fetch_snapshot
from epp.siblings.reader import IndexIdentity, ReadLimits
from epp.siblings.server import ServerSettings, SnapshotServer
from epp.siblings.tls import MutualTls
from tests.integration.siblings.certificates import NAME, Authority, put
from tests.integration.siblings.rig import (
    HOST,
    PATIENT,
    SEED,
    SHORT_S,
    WAIT_S,
    Source,
    ask,
    counted,
    misbehaving,
    serving,
)
from tests.unit.siblings.test_wire import row

ROWS = [row(0, "p0"), row(3, "p1"), row(40_000, "p2")]  # the last is more than one slice


async def test_everything_arrives_as_it_was(certificates: Path) -> None:
    async with serving(Source(ROWS), certificates) as server:
        found = await ask(certificates, server.port)
        assert (found.outcome, found.seed, list(found.rows)) == ("complete", SEED, ROWS)
        again = await ask(certificates, server.port)
        assert again.rows == found.rows
        await counted(server, served=2, sent_rows=6)
    assert server.counters.sent_bytes == found.received_bytes * 2


async def test_a_sibling_without_claims_gives_its_seed_and_the_next_one_is_asked(certificates: Path) -> None:
    async with serving(Source(), certificates) as cold, serving(Source(ROWS), certificates) as warm:
        found = await ask(certificates, cold.port)
        assert (found.outcome, found.seed, found.rows) == ("complete", SEED, ())
        found = await ask(certificates, cold.port, warm.port)
        assert found.sibling.endswith(str(warm.port))
        assert len(found.rows) == 3


async def test_siblings_that_are_not_there_are_passed_over(
    certificates: Path,
) -> None:
    async with serving(Source(ROWS), certificates) as server:
        port = server.port
    assert (await ask(certificates, port)).outcome == "unreachable"
    assert (await ask(certificates)).outcome == "unreachable"
    async with serving(Source(ROWS), certificates) as server:
        nowhere = SiblingAddress("no-such-name.invalid", 1, NAME)
        there = SiblingAddress("localhost", server.port, NAME)
        found = await fetch_snapshot(
            [nowhere, there], MutualTls(certificates).client_context, IndexIdentity("s-1"), PATIENT
        )
        assert found.outcome == "complete"


@pytest.mark.parametrize(
    ("change", "outcome"),
    [({"scheme": "other-1"}, "scheme"), ({"seed": b"f" * 16}, "seed")],
)
async def test_a_snapshot_that_does_not_fit_our_index_is_refused_by_name(
    certificates: Path, change: dict[str, object], outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Source(ROWS), certificates) as server:
        found = await ask(certificates, server.port, **change)  # type: ignore[arg-type]
        assert (found.outcome, found.rows, found.seed) == (outcome, (), None)
        assert f"refused: another {outcome}" in caplog.text
        assert (await ask(certificates, server.port, seed=SEED)).outcome == "complete"


async def test_no_text_shows_the_seed(certificates: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with serving(Source(ROWS), certificates) as server:
        found = await ask(certificates, server.port)
        await counted(server, served=1)
    for text in (caplog.text, repr(found)):
        assert SEED.hex() not in text
        assert SEED.decode() not in text
    assert "snapshot of 3 endpoints given" in caplog.text


# --- who is let in ----------------------------------------------------------------------------------


async def test_a_certificate_of_another_authority_is_not_let_in(
    certificates: Path, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority("strangers").issue(tmp_path / "stranger", trusts=authority)
    async with serving(Source(ROWS), certificates) as server:
        found = await ask(stranger, server.port)
        assert (found.outcome, found.rows, found.seed) == ("unreachable", (), None)
        assert (await ask(certificates, server.port)).outcome == "complete"
        await counted(server, untrusted=1, served=1)


async def test_without_a_certificate_nobody_is_let_in(certificates: Path) -> None:
    def nobody() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(certificates / "ca.crt")
        return context

    async with serving(Source(ROWS), certificates) as server:
        found = await ask(nobody, server.port)
        assert (found.outcome, found.received_bytes) == ("unreachable", 0)
        await counted(server, untrusted=1)


@pytest.mark.parametrize("first", [b"", b"GET /metrics HTTP/1.1\r\n\r\n", b"kvpull-snapshot\n\0\1"])
async def test_without_tls_nobody_is_let_in(certificates: Path, first: bytes) -> None:
    settings = ServerSettings(HOST, 0, idle_s=SHORT_S)
    async with serving(Source(ROWS), certificates, settings) as server:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(first)
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        writer.close()
        assert SEED not in answer
        assert (await ask(certificates, server.port)).outcome == "complete"
        await counted(server, untrusted=1, served=1)


async def test_a_server_of_another_authority_or_name_is_not_believed(
    certificates: Path, authority: Authority, tmp_path: Path
) -> None:
    impostor = Authority("strangers").issue(tmp_path / "impostor", trusts=authority)
    async with serving(Source(ROWS), impostor) as server:
        assert (await ask(certificates, server.port)).outcome == "unreachable"
    async with serving(Source(ROWS), certificates) as server:
        assert (await ask(certificates, server.port, name="another.test")).outcome == "unreachable"


async def test_certificates_are_read_again_and_bad_ones_not_used(
    certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rotation of everything, authority included, while the server runs."""
    caplog.set_level("INFO")
    new = Authority("new")
    mine = new.issue(tmp_path / "mine")
    async with serving(Source(ROWS), certificates) as server:
        assert (await ask(mine, server.port)).outcome == "unreachable"
        put(certificates, "tls.key", b"nonsense")
        assert (await ask(mine, server.port)).outcome == "unreachable"
        assert "the last good stays" in caplog.text
        new.issue(certificates)
        assert (await ask(mine, server.port)).outcome == "complete"
        assert "certificates reloaded" in caplog.text


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense"])
def test_unusable_files_stop_the_start(certificates: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (certificates / name).unlink()
    else:
        put(certificates, name, content)
    with pytest.raises(ConfigError, match=r"tls\.crt, tls\.key .* ca\.crt are needed"):
        MutualTls(certificates)


def test_a_key_of_another_certificate_stops_the_start(
    certificates: Path, authority: Authority, tmp_path: Path
) -> None:
    other = authority.issue(tmp_path / "other")
    put(certificates, "tls.key", (other / "tls.key").read_bytes())
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        MutualTls(certificates)


async def test_a_taken_port_is_a_sentence(certificates: Path) -> None:
    async with serving(Source(), certificates) as server:
        second = SnapshotServer(
            Source(), MutualTls(certificates).server_context, ServerSettings(HOST, server.port)
        )
        with pytest.raises(ConfigError, match="snapshot port"):
            second.start()


# --- versions, bounds, slow readers -----------------------------------------------------------------


async def test_a_client_of_another_version_is_told_so(certificates: Path) -> None:
    async with serving(Source(ROWS), certificates) as server:
        reader, writer = await asyncio.open_connection(
            HOST, server.port, ssl=MutualTls(certificates).client_context(), server_hostname=NAME
        )
        writer.write(wire.encode_request(version=2))
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        writer.close()
        await counted(server, refused=1)
    assert wire.decode_header(answer[wire.LENGTH_BYTES :]) == wire.Refusal(wire.VERSION, "version")


@pytest.mark.parametrize("request_", [b"x" * wire.REQUEST_BYTES, b"kvp", b""])
async def test_a_trusted_client_that_does_not_ask_is_dropped(certificates: Path, request_: bytes) -> None:
    settings = ServerSettings(HOST, 0, idle_s=SHORT_S)
    async with serving(Source(ROWS), certificates, settings) as server:
        reader, writer = await asyncio.open_connection(
            HOST, server.port, ssl=MutualTls(certificates).client_context(), server_hostname=NAME
        )
        writer.write(request_)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        writer.transport.abort()
        assert (await ask(certificates, server.port)).outcome == "complete"
        await counted(server, served=1)


async def test_a_sibling_that_does_not_read_is_cut_off_and_others_are_served(certificates: Path) -> None:
    """The kernel's buffers take some megabytes; the rest has to wait for the reader."""
    settings = ServerSettings(HOST, 0, idle_s=SHORT_S, serving=1)
    source = Source([row(1_000_000, "big")])
    async with serving(source, certificates, settings) as server:
        reader, writer = await asyncio.open_connection(
            HOST, server.port, ssl=MutualTls(certificates).client_context(), server_hostname=NAME, limit=1_024
        )
        writer.write(wire.encode_request())
        await reader.readexactly(wire.LENGTH_BYTES)  # it has begun; nothing is read from here on
        found = await ask(certificates, server.port, settings=PATIENT)
        writer.transport.abort()
        assert found.outcome == "complete"
        await counted(server, cut=1, served=1)


async def test_more_connections_than_are_allowed_wait_and_are_served(certificates: Path) -> None:
    settings = ServerSettings(HOST, 0, connections=2, serving=1)
    async with serving(Source(ROWS), certificates, settings) as server:
        found = await asyncio.gather(*(ask(certificates, server.port, settings=PATIENT) for _ in range(6)))
        assert [f.outcome for f in found] == ["complete"] * 6


async def test_a_fault_of_the_source_costs_one_snapshot_and_not_the_server(certificates: Path) -> None:
    class Faulty(Source):
        def rows(self):  # type: ignore[no-untyped-def]
            yield ROWS[0]
            raise ZeroDivisionError

    async with serving(Faulty(ROWS), certificates) as server:
        found = await ask(certificates, server.port)
        assert (found.outcome, len(found.rows)) == ("cut", 1)
        assert (await ask(certificates, server.port)).outcome == "cut"
        await counted(server, failed=2)


async def test_the_loop_turns_while_a_row_is_being_made(certificates: Path) -> None:
    turns = 0

    class Slow(Source):
        def rows(self):  # type: ignore[no-untyped-def]
            for made in ROWS:
                yield None
                asyncio.get_running_loop().call_soon(turn)
                yield None
                yield made

    def turn() -> None:
        nonlocal turns
        turns += 1

    async with serving(Slow(ROWS), certificates) as server:
        found = await ask(certificates, server.port)
        assert (found.outcome, len(found.rows)) == ("complete", len(ROWS))
    assert turns == len(ROWS)


async def test_the_size_limit_keeps_what_came_before_it(certificates: Path) -> None:
    async with serving(Source(ROWS), certificates) as server:
        found = await ask(certificates, server.port, settings=replace(PATIENT, limits=ReadLimits(10_000)))
        assert (found.outcome, [r.endpoint.pod for r in found.rows]) == ("size_limit", ["p0", "p1"])
        assert found.received_bytes < 10_000


async def test_a_sibling_that_serves_while_it_is_stopped_ends(certificates: Path) -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()

    async with misbehaving(silent, certificates) as port:
        task = asyncio.create_task(ask(certificates, port, settings=PATIENT))
        await asyncio.wait_for(asked.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
