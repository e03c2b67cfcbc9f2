"""Asks siblings for a snapshot, once, before this replica's index is made.

The first sibling that has anything gives everything: its seed, and a row an endpoint. All of it takes a
bounded time. A snapshot that breaks off is used as far as its rows are whole; one that is malformed is
not used at all. Whatever goes wrong, the picker starts cold: there is no error here that stops it.
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
from epp.siblings.reader import IndexIdentity, ReadLimits, SizeLimit, SnapshotReader, Unfit

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
    total_s: float = 10.0  # for all siblings together
    max_addresses: int = 16  # of all names together
    limits: ReadLimits = field(default_factory=ReadLimits)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What came of asking. `outcome` is a stable label: "complete"; "cut" and "size_limit" with the rows
    before; "malformed", "version", "scheme", "seed" and "unreachable" without any."""

    outcome: str
    sibling: str = ""
    seed: bytes | None = field(default=None, repr=False)
    rows: tuple[wire.Row, ...] = ()
    received_bytes: int = 0


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
                reader = SnapshotReader(identity, settings.limits)
                try:
                    found = await _ask(address, context(), reader, settings)
                except asyncio.CancelledError:  # the time for all of them is over
                    best = _better(best, _so_far("cut", address, reader))
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


async def _ask(
    address: SiblingAddress, context: ssl.SSLContext, found: SnapshotReader, settings: ClientSettings
) -> Snapshot:
    """One sibling; `found` keeps what has come when the time is over."""
    try:
        async with asyncio.timeout(settings.connect_s):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=context, server_hostname=address.server_name
            )
    except OSError as error:  # TLS and time-out are among them
        log.warning("snapshot: sibling %s: %s", address, _words(error))
        return Snapshot("unreachable")
    try:
        writer.write(wire.encode_request())
        await found.read(reader)
    except wire.FormatError as error:
        log.warning("snapshot of %s is dropped: %s", address, error)
        return Snapshot("malformed", str(address))
    except Unfit as error:
        log.warning("snapshot of %s is refused: another %s", address, error)
        return Snapshot(str(error), str(address))
    except SizeLimit as error:
        log.warning("snapshot of %s is larger than %s", address, error)
        return _so_far("size_limit", address, found)
    except (OSError, asyncio.IncompleteReadError) as error:
        log.warning("snapshot of %s was cut off: %s", address, _words(error))
        return _so_far("cut", address, found)
    finally:
        writer.transport.abort()
    return _so_far("complete", address, found)


def _so_far(outcome: str, address: SiblingAddress, found: SnapshotReader) -> Snapshot:
    if found.seed is None:  # not even a greeting
        return Snapshot("unreachable", str(address))
    return Snapshot(outcome, str(address), found.seed, tuple(found.rows), found.received_bytes)


def _words(error: Exception) -> str:
    """Without what the peer may have put into it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return error.reason or "TLS"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
