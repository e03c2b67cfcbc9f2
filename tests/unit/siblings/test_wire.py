"""The snapshot format: what comes back, and what is refused before anything is allocated."""

from __future__ import annotations

from array import array
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from engine_plugin.identity import EndpointId
from epp.core.adoption import ExportedView
from epp.core.index_dump import EndpointDump, GroupDump
from epp.core.stream_position import StreamPosition
from epp.siblings import wire

SEED = b"0123456789abcdef"


def row(records: int = 3, pod: str = "pod-a") -> wire.Row:
    dump = EndpointDump(
        scheme="s-1",
        model="m",
        block_size_tokens=16,
        names=array("Q", range(records)).tobytes(),
        keys=array("Q", [2**64 - 1 - i for i in range(records)]).tobytes(),
        device_copies=array("H", [1] * records).tobytes(),
        cpu_copies=array("H", [2] * records).tobytes(),
        complete=True,
    )
    position = StreamPosition(9, True, (2**64 - 1, 0, 5))
    return wire.Row(EndpointId(pod, 3), "10.0.0.1", 5557, ExportedView(position, dump))


def header_of(raw: bytes) -> wire.Header:
    length = wire.decode_length(raw[: wire.LENGTH_BYTES])
    assert length == len(raw) - wire.LENGTH_BYTES
    return wire.decode_header(raw[wire.LENGTH_BYTES :])


def test_a_row_comes_back_as_it_was() -> None:
    sent = row()
    first, *pieces = wire.encode_row(sent)
    header, body = header_of(first), b"".join(pieces)
    assert isinstance(header, wire.RowHeader)
    assert header.columns_bytes == len(body) == 60
    assert wire.build_row(header, body, "s-1") == sent


def with_groups() -> wire.Row:
    plain = row()
    columns = array("Q", [7, 8]).tobytes(), array("Q", [1, 2]).tobytes(), b"\1\0\2\0", b"\3\0\4\0"
    groups = (
        GroupDump(1, "sliding_window", 128, 16, "", *columns),
        GroupDump(None, "mamba", 0, 0, "kind", b"", b"", b"", b""),
    )
    dump = replace(plain.view.dump, groups=groups, main_group=0)
    return replace(plain, view=replace(plain.view, dump=dump))


def test_groups_travel_behind_the_row_they_belong_to() -> None:
    sent = with_groups()
    first, *pieces = wire.encode_row(sent)
    header, body = header_of(first), b"".join(pieces)
    assert isinstance(header, wire.RowHeader)
    assert header.columns_bytes == len(body) == 100
    assert wire.build_row(header, body, "s-1") == sent


@pytest.mark.parametrize("group", [[1, "k", -1, 16, "", 0], [1, "k", 1, 16, "", 2**62], [1, "k"], "x"])
def test_groups_out_of_range(group: object) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(wire.row_header(row())))
    for groups in ([group], [[1, "k", 1, 16, "", 0]] * (wire.MAX_GROUPS + 1)):
        with pytest.raises(wire.FormatError):
            wire.decode_header(msgspec.msgpack.encode({**fields, "groups": groups}))


def test_a_row_that_no_sibling_would_take_is_not_sent() -> None:
    plain = row()
    long = replace(plain.view.dump, model="m" * 2_000)
    with pytest.raises(wire.FormatError):
        wire.encode_row(replace(plain, view=replace(plain.view, dump=long)))


@pytest.mark.parametrize(
    "header", [wire.Hello(1, SEED, "s-1", 7), wire.Refusal(1, "version"), wire.End(3)], ids=lambda h: type(h)
)
def test_other_headers_come_back(header: wire.Header) -> None:
    assert header_of(wire.encode_header(header)) == header


def test_the_seed_is_in_no_text() -> None:
    hello = wire.Hello(1, SEED, "s-1", 7)
    assert "0123" not in repr(hello)
    assert SEED.hex() not in repr(hello)


def test_requests() -> None:
    assert wire.decode_request(wire.encode_request()) == wire.VERSION
    assert wire.decode_request(wire.encode_request(77)) == 77
    with pytest.raises(wire.FormatError):
        wire.decode_request(b"GET / HTTP/1.1\r\n\r\n"[: wire.REQUEST_BYTES].ljust(wire.REQUEST_BYTES))


@pytest.mark.parametrize("length", [wire.MAX_HEADER_BYTES + 1, 2**31, 2**32 - 1])
def test_absurd_lengths(length: int) -> None:
    with pytest.raises(wire.FormatError):
        wire.decode_length(length.to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pod", ""),
        ("pod", "p" * 254),
        ("pod", 5),
        ("rank", -1),
        ("rank", 2**31),
        ("host", ""),
        ("events_port", 0),
        ("events_port", 65_536),
        ("next_seq", -1),
        ("next_seq", 1.5),
        ("digests", []),
        ("digests", [0] * 17),
        ("digests", [-1]),
        ("model", "m" * 1_025),
        ("block_size", -16),
        ("block_size", 2**40),
        ("records", -1),
        ("records", wire.MAX_RECORDS + 1),
        ("records", 2**63),
        ("exact", 1),
        ("complete", None),
    ],
)
def test_numbers_and_names_out_of_range(field: str, value: object) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(wire.row_header(row())))
    assert isinstance(wire.decode_header(msgspec.msgpack.encode(fields)), wire.RowHeader)
    with pytest.raises(wire.FormatError):
        wire.decode_header(msgspec.msgpack.encode({**fields, field: value}))


@pytest.mark.parametrize("seed", [b"", SEED[:15], SEED + b"x"])
def test_seeds_of_another_length(seed: bytes) -> None:
    with pytest.raises(wire.FormatError):
        wire.decode_header(wire.encode_header(wire.Hello(1, seed, "s", 1))[wire.LENGTH_BYTES :])


@pytest.mark.parametrize("change", [-1, 1])
def test_columns_of_another_length(change: int) -> None:
    header = wire.row_header(row())
    with pytest.raises(wire.FormatError):
        wire.build_row(header, bytes(header.columns_bytes + change), "s")


def test_every_truncation_of_a_header() -> None:
    raw = wire.encode_header(wire.row_header(row()))[wire.LENGTH_BYTES :]
    for size in range(len(raw)):
        with pytest.raises(wire.FormatError):
            wire.decode_header(raw[:size])


@given(st.binary(max_size=200) | st.tuples(st.integers(0, 150), st.binary(min_size=1, max_size=4)))
def test_no_bytes_raise_anything_else(change: bytes | tuple[int, bytes]) -> None:
    if isinstance(change, bytes):
        raw = change
    else:
        whole = bytearray(wire.encode_header(wire.row_header(row()))[wire.LENGTH_BYTES :])
        whole[change[0] : change[0] + len(change[1])] = change[1]
        raw = bytes(whole)
    try:
        header = wire.decode_header(raw)
    except wire.FormatError:
        return
    if isinstance(header, wire.RowHeader):
        assert 0 <= header.columns_bytes <= wire.MAX_RECORDS * wire.RECORD_BYTES
