"""Asks siblings for a snapshot, once, before this replica's index is made.

The first sibling that has anything gives everything: its seed, and a row an endpoint. All of it takes a
bounded time and a bounded number of bytes; memory grows with what has arrived, never with what a length
promises. A snapshot that breaks off is used as far as its rows are whole; one that is malformed is not
used at all. Whatever goes wrong, the picker starts cold: there is no error here that stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from epp.siblings import wire

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SiblingAddress:
    """Where to ask; a name may stand for several replicas. `server_name` is what their certificate must
    be valid for."""

    host: str
    port: int
    server_name: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Bounds."""

    connect_s: float = 2.0  # name look-up; connection and handshake
    idle_s: float = 5.0  # for each read
    total_s: float = 10.0  # for all siblings together
    max_bytes: int = 1 << 30
    max_addresses: int = 16  # of all names together
    slice_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True)
class IndexIdentity:
    """What a snapshot must fit: the key scheme of our index, and its seed where one was given to us."""

    scheme: str
    seed: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What came of asking. `outcome` is a stable label: "complete"; "cut" and "size_limit" with the rows
    before; "malformed", "version", "scheme", "seed" and "unreachable" without any."""

    outcome: str
    sibling: str = ""
    seed: bytes | None = field(default=None, repr=False)
    rows: tuple[wire.Row, ...] = ()
    received_bytes: int = 0


class _Refused(Exception):
    """The snapshot is of no use to us; the argument is the outcome."""


async def fetch_snapshot(
    siblings: Sequence[SiblingAddress],
    context: Callable[[], ssl.SSLContext],
    identity: IndexIdentity,
    settings: ClientSettings | None = None,
) -> Snapshot:
    """Ask one sibling after the other until one has something. Never raises."""
    settings = settings or ClientSettings()
    best = Snapshot("unreachable")
    started_s = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.total_s):
            for address in await _resolve(siblings, settings):
                fetching = _Fetching(address, identity, settings)
                try:
                    found = await fetching.run(context())
                except asyncio.CancelledError:  # the time for all of them is over
                    best = _better(best, fetching.so_far("cut"))
                    raise
                best = _better(best, found)
                if best.rows:
                    break
    log.info(
        "snapshot: %s%s, %d endpoints, %d bytes in %.1f s",
        best.outcome,
        f" from {best.sibling}" if best.sibling else "",
        len(best.rows),
        best.received_bytes,
        time.monotonic() - started_s,
    )
    return best


def _better(best: Snapshot, found: Snapshot) -> Snapshot:
    """Rows win, then a seed, then whoever said why not."""
    if found.rows or (found.seed is not None and best.seed is None):
        return found
    return found if best.outcome == "unreachable" else best


async def _resolve(siblings: Sequence[SiblingAddress], settings: ClientSettings) -> list[SiblingAddress]:
    """Every address of every name, in the order given; a name that cannot be found is passed over."""
    loop, found = asyncio.get_running_loop(), list[SiblingAddress]()
    for sibling in siblings:
        try:
            async with asyncio.timeout(settings.connect_s):
                infos = await loop.getaddrinfo(sibling.host, sibling.port, type=1)  # SOCK_STREAM
        except (OSError, TimeoutError) as error:
            log.warning("snapshot: sibling %s: %s", sibling, type(error).__name__)
            continue
        for info in infos:
            address = replace(sibling, host=str(info[4][0]))
            if address not in found:
                found.append(address)
    return found[: settings.max_addresses]


class _Fetching:
    """One sibling's answer as far as it has come."""

    def __init__(self, address: SiblingAddress, identity: IndexIdentity, settings: ClientSettings) -> None:
        self._address = address
        self._identity = identity
        self._settings = settings
        self._seed: bytes | None = None
        self._rows: list[wire.Row] = []
        self._received_bytes = 0

    def so_far(self, outcome: str) -> Snapshot:
        rows = tuple(self._rows)
        return Snapshot(outcome, str(self._address), self._seed, rows, self._received_bytes)

    async def run(self, context: ssl.SSLContext) -> Snapshot:
        address, settings = self._address, self._settings
        try:
            async with asyncio.timeout(settings.connect_s):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=context, server_hostname=address.server_name
                )
        except (OSError, TimeoutError) as error:
            log.warning("snapshot: sibling %s: %s", address, _words(error))
            return Snapshot("unreachable")
        try:
            writer.write(wire.encode_request())
            await self._read(reader)
        except wire.FormatError as error:
            log.warning("snapshot of %s is dropped: %s", address, error)
            return Snapshot("malformed", str(address))
        except _Refused as refusal:
            return self._refused(str(refusal))
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.warning("snapshot of %s was cut off: %s", address, _words(error))
            return self.so_far("cut" if self._seed is not None else "unreachable")
        finally:
            writer.transport.abort()
        return self.so_far("complete")

    def _refused(self, outcome: str) -> Snapshot:
        if outcome == "size_limit":
            log.warning("snapshot of %s is larger than %d bytes", self._address, self._settings.max_bytes)
            return self.so_far(outcome)
        log.warning("snapshot of %s is refused: another %s", self._address, outcome)
        return Snapshot(outcome, str(self._address))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        hello = await self._header(reader)
        if isinstance(hello, wire.Refusal):
            raise _Refused("version")
        if not isinstance(hello, wire.Hello):
            raise wire.FormatError("it does not begin with a greeting")
        if hello.version != wire.VERSION:
            raise _Refused("version")
        if hello.scheme != self._identity.scheme:
            raise _Refused("scheme")
        if self._identity.seed not in (None, hello.seed):
            raise _Refused("seed")
        self._seed = hello.seed
        while not isinstance(header := await self._header(reader), wire.End):
            if not isinstance(header, wire.RowHeader):
                raise wire.FormatError("something else than a row")
            if len(self._rows) >= hello.endpoints:
                raise wire.FormatError("more rows than were announced")
            raw = await self._exactly(reader, header.columns_bytes)
            self._rows.append(wire.build_row(header, raw, hello.scheme))
        if header.rows != len(self._rows):
            raise wire.FormatError("another number of rows than were sent")

    async def _header(self, reader: asyncio.StreamReader) -> wire.Header:
        length = wire.decode_length(await self._exactly(reader, wire.LENGTH_BYTES))
        return wire.decode_header(await self._exactly(reader, length))

    async def _exactly(self, reader: asyncio.StreamReader, size: int) -> bytes:
        """Checks the size limit first; grows with what arrives."""
        if self._received_bytes + size > self._settings.max_bytes:
            raise _Refused("size_limit")
        found = bytearray()
        while len(found) < size:
            async with asyncio.timeout(self._settings.idle_s):
                piece = await reader.read(min(size - len(found), self._settings.slice_bytes))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size - len(found))
            found += piece
            self._received_bytes += len(piece)
        return bytes(found)


def _words(error: Exception) -> str:
    """Without what the peer may have put into it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return error.reason or "TLS"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
