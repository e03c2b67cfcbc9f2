"""Reads one sibling's answer from a stream: within limits, and only as far as it fits our index.

Memory grows with what has arrived, never with what a length promises. What was read before anything
went wrong stays readable. It must not know where the stream comes from.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from epp.siblings import wire


class Unfit(Exception):
    """The snapshot is of no use to us: another "version", "scheme" or "seed", which is the argument."""


class SizeLimit(Exception):
    """More bytes than we take; the argument says how many that are."""


@dataclass(frozen=True, slots=True)
class IndexIdentity:
    """What a snapshot must fit: the key scheme of our index, and its seed where one was given to us."""

    scheme: str
    seed: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bounds of one answer."""

    max_bytes: int = 1 << 30
    idle_s: float = 5.0  # for each read
    slice_bytes: int = 256 << 10


class SnapshotReader:
    """One answer as far as it has come. `seed` None: not even the greeting has."""

    def __init__(self, identity: IndexIdentity, limits: ReadLimits | None = None) -> None:
        self._identity = identity
        self._limits = limits or ReadLimits()
        self.seed: bytes | None = None
        self.rows: list[wire.Row] = []
        self.received_bytes = 0

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read to the end of the snapshot.

        Raises:
            Unfit: it is for another index.
            SizeLimit: it is too large.
            FormatError: it is no snapshot.
            IncompleteReadError, OSError (TimeoutError): it breaks off, or nothing more comes.
        """
        hello = await self._greeting(reader)
        self.seed = hello.seed
        while not isinstance(header := await self._header(reader), wire.End):
            if not isinstance(header, wire.RowHeader):
                raise wire.FormatError("something else than a row")
            if len(self.rows) >= hello.endpoints:
                raise wire.FormatError("more rows than were announced")
            raw = await self._exactly(reader, header.columns_bytes)
            self.rows.append(wire.build_row(header, raw, hello.scheme))
        if header.rows != len(self.rows):
            raise wire.FormatError("another number of rows than were sent")

    async def _greeting(self, reader: asyncio.StreamReader) -> wire.Hello:
        hello = await self._header(reader)
        if isinstance(hello, wire.Refusal):
            raise Unfit("version")  # the one reason there is
        if not isinstance(hello, wire.Hello):
            raise wire.FormatError("it does not begin with a greeting")
        if hello.version != wire.VERSION:
            raise Unfit("version")
        if hello.scheme != self._identity.scheme:
            raise Unfit("scheme")
        if self._identity.seed not in (None, hello.seed):
            raise Unfit("seed")
        return hello

    async def _header(self, reader: asyncio.StreamReader) -> wire.Header:
        length = wire.decode_length(await self._exactly(reader, wire.LENGTH_BYTES))
        return wire.decode_header(await self._exactly(reader, length))

    async def _exactly(self, reader: asyncio.StreamReader, size: int) -> bytes:
        """Looks at the size limit first; grows with what arrives."""
        limits = self._limits
        if self.received_bytes + size > limits.max_bytes:
            raise SizeLimit(f"{limits.max_bytes} bytes")
        found = bytearray()
        while len(found) < size:
            async with asyncio.timeout(limits.idle_s):
                piece = await reader.read(min(size - len(found), limits.slice_bytes))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size - len(found))
            found += piece
            self.received_bytes += len(piece)
        return bytes(found)
