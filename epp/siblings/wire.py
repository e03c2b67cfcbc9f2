"""Format of an index snapshot. Pure; the only place that knows it.

    client   MAGIC, version (u16)
    server   header [columns], header [columns], ...

A header is a length (u32) and that many bytes of msgpack: `Hello` (or `Refusal`), then a `Row` an
endpoint, then `End`. A row's columns follow it without a gap: engine names (u64 LE), our keys (u64 LE),
copies on the device (u16 LE), copies in CPU memory (u16 LE); then the same four of each of its groups.
Without `End` the snapshot was cut off.

Whatever bytes come in, the only exception is `FormatError`. Lengths are bounded before they are used.
It carries the index seed: it must never be sent over anything but mutual TLS, nor written to a log.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from engine_plugin.identity import EndpointId
from epp.core.adoption import ExportedView
from epp.core.hashing import INDEX_SEED_BYTES
from epp.core.index_dump import EndpointDump, GroupDump
from epp.core.stream_position import MAX_OVERLAP_BATCHES, StreamPosition

VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
MAX_RECORDS: Final = 1 << 24  # in one row
MAX_ROWS: Final = 16_384
MAX_GROUPS: Final = 128  # in one row
RECORD_BYTES: Final = 20
_MAGIC: Final = b"kvpull-snapshot\n"
_REQUEST: Final = struct.Struct(f">{len(_MAGIC)}sH")
_LENGTH: Final = struct.Struct(">I")
REQUEST_BYTES: Final = _REQUEST.size
LENGTH_BYTES: Final = _LENGTH.size

_Text = Annotated[str, msgspec.Meta(max_length=1_024)]
_Word = Annotated[int, msgspec.Meta(ge=0)]  # msgpack itself bounds integers to 64 bits
_BlockSize = Annotated[int, msgspec.Meta(ge=0, le=65_536)]
_Records = Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORDS)]
_Rows = Annotated[int, msgspec.Meta(ge=0, le=MAX_ROWS)]


class FormatError(ValueError):
    """Bytes that are no snapshot. The text never shows them."""


class Hello(msgspec.Struct, tag="hello", frozen=True, repr_omit_defaults=True):
    """What the whole snapshot has in common; `endpoints` is how many rows may follow at most."""

    version: int
    seed: Annotated[bytes, msgspec.Meta(min_length=INDEX_SEED_BYTES, max_length=INDEX_SEED_BYTES)]
    scheme: _Text
    endpoints: _Rows

    def __repr__(self) -> str:  # the seed must not reach a log
        return f"Hello(version={self.version}, scheme={self.scheme!r}, endpoints={self.endpoints})"


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    """There is no snapshot, and why."""

    version: int
    reason: _Text


class GroupHeader(msgspec.Struct, array_like=True, frozen=True):
    """One attention group of an endpoint, besides the full-attention one."""

    group_idx: int | None
    kind: _Text
    window_tokens: _Word
    block_size: _BlockSize
    refusal: _Text
    records: _Records


class RowHeader(msgspec.Struct, tag="row", frozen=True):
    """One endpoint; `records` is the length of each of its columns."""

    pod: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    rank: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    events_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    next_seq: _Word
    exact: bool
    digests: Annotated[list[_Word], msgspec.Meta(min_length=1, max_length=MAX_OVERLAP_BATCHES)]
    model: _Text
    block_size: _BlockSize
    records: _Records
    complete: bool
    main_group: int | None = None
    groups: Annotated[list[GroupHeader], msgspec.Meta(max_length=MAX_GROUPS)] = []

    @property
    def columns_bytes(self) -> int:
        return RECORD_BYTES * (self.records + sum(group.records for group in self.groups))


class End(msgspec.Struct, tag="end", frozen=True):
    """Nothing is missing; `rows` were sent."""

    rows: _Rows


Header = Hello | Refusal | RowHeader | End
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode


@dataclass(frozen=True, slots=True)
class Row:
    """A sibling's view of one endpoint, and the address at which it heard that endpoint's events."""

    endpoint: EndpointId
    host: str
    events_port: int
    view: ExportedView


def encode_request(version: int = VERSION) -> bytes:
    return _REQUEST.pack(_MAGIC, version)


def decode_request(raw: bytes) -> int:
    """The version that is asked for.

    Raises:
        FormatError: this is no request for a snapshot.
    """
    magic, version = _REQUEST.unpack(raw)
    if magic != _MAGIC:
        raise FormatError("not a request for a snapshot")
    assert isinstance(version, int)
    return version


def encode_header(header: Header) -> bytes:
    raw = _encode(header)
    return _LENGTH.pack(len(raw)) + raw


def decode_length(raw: bytes) -> int:
    """Bytes of the header that follows.

    Raises:
        FormatError: more than any header has.
    """
    length = int(_LENGTH.unpack(raw)[0])
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"header of {length} bytes, limit {MAX_HEADER_BYTES}")
    return length


def decode_header(raw: bytes) -> Header:
    """Raises FormatError for anything that is no header, or has a number out of range."""
    try:
        header: Header = _decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"unreadable header: {type(error).__name__}") from None
    return header


def encode_row(row: Row) -> list[bytes]:
    """The header and the columns, in the order in which they travel.

    Raises:
        FormatError: it has something that no sibling would take; better no row than no snapshot.
    """
    header = encode_header(row_header(row))
    decode_length(header[:LENGTH_BYTES])
    decode_header(header[LENGTH_BYTES:])
    dump = row.view.dump
    pieces = [header, *_columns(dump)]
    for group in dump.groups:
        pieces += _columns(group)
    return pieces


def _columns(dump: EndpointDump | GroupDump) -> tuple[bytes, bytes, bytes, bytes]:
    return dump.names, dump.keys, dump.device_copies, dump.cpu_copies


def row_header(row: Row) -> RowHeader:
    position, dump = row.view.position, row.view.dump
    return RowHeader(
        pod=row.endpoint.pod,
        rank=row.endpoint.rank,
        host=row.host,
        events_port=row.events_port,
        next_seq=position.next_seq,
        exact=position.exact,
        digests=list(position.digests),
        model=dump.model,
        block_size=dump.block_size_tokens,
        records=_records(dump),
        complete=dump.complete,
        main_group=dump.main_group,
        groups=[
            GroupHeader(
                group.group_idx,
                group.kind,
                group.window_tokens,
                group.block_size_tokens,
                group.refusal,
                _records(group),
            )
            for group in dump.groups
        ],
    )


def _records(dump: EndpointDump | GroupDump) -> int:
    return len(dump.names) // 8


def build_row(header: RowHeader, raw: bytes, scheme: str) -> Row:
    """The row of a header and its columns, `header.columns_bytes` in all. Whether it is *true* is
    found out by the index and the engine."""
    if len(raw) != header.columns_bytes:
        raise FormatError("columns have another length than their header says")
    names, keys, device_copies, cpu_copies = _split(raw, 0, header.records)
    groups, at = list[GroupDump](), header.records
    for group in header.groups:
        shape = group.group_idx, group.kind, group.window_tokens, group.block_size, group.refusal
        groups.append(GroupDump(*shape, *_split(raw, at, group.records)))
        at += group.records
    dump = EndpointDump(
        scheme=scheme,
        model=header.model,
        block_size_tokens=header.block_size,
        names=names,
        keys=keys,
        device_copies=device_copies,
        cpu_copies=cpu_copies,
        complete=header.complete,
        groups=tuple(groups),
        main_group=header.main_group,
    )
    position = StreamPosition(header.next_seq, header.exact, tuple(header.digests))
    endpoint = EndpointId(header.pod, header.rank)
    return Row(endpoint, header.host, header.events_port, ExportedView(position, dump))


def _split(raw: bytes, before: int, count: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Four columns of `count` records, which lie behind `before` others."""
    at = before * RECORD_BYTES
    ends = [at, at + 8 * count, at + 16 * count, at + 18 * count, at + RECORD_BYTES * count]
    names, keys, device, cpu = (raw[start:end] for start, end in itertools.pairwise(ends))
    return names, keys, device, cpu
