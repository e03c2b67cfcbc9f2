"""An answer cut at every byte, in one piece or byte by byte."""

from __future__ import annotations

import asyncio

import pytest

from epp.siblings import wire
from epp.siblings.reader import IndexIdentity, ReadLimits, SizeLimit, SnapshotReader, Unfit
from tests.unit.siblings.test_wire import SEED, row

ROWS = [row(0, "p0"), row(3, "p1"), row(5, "p2")]
PARTS = [wire.encode_header(wire.Hello(wire.VERSION, SEED, "s-1", 3))]
PARTS += [b"".join(wire.encode_row(r)) for r in ROWS]
WHOLE = b"".join([*PARTS, wire.encode_header(wire.End(3))])


async def read(
    data: bytes, *, limits: ReadLimits | None = None, identity: IndexIdentity | None = None
) -> tuple[SnapshotReader, Exception | None]:
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    found = SnapshotReader(identity or IndexIdentity("s-1"), limits)
    try:
        await found.read(stream)
    except (Unfit, SizeLimit, wire.FormatError, asyncio.IncompleteReadError) as error:
        return found, error
    return found, None


async def test_a_whole_answer() -> None:
    for slice_bytes in (1, 7, 1 << 20):
        found, error = await read(WHOLE, limits=ReadLimits(slice_bytes=slice_bytes))
        assert error is None
        assert (found.seed, found.rows, found.received_bytes) == (SEED, ROWS, len(WHOLE))


async def test_an_answer_cut_at_every_byte_keeps_its_whole_rows() -> None:
    ends = [sum(map(len, PARTS[: i + 1])) for i in range(len(PARTS))]
    for size in range(len(WHOLE)):
        found, error = await read(WHOLE[:size])
        assert isinstance(error, asyncio.IncompleteReadError), size
        assert found.rows == ROWS[: sum(size >= end for end in ends[1:])], size
        assert found.seed == (SEED if size >= ends[0] else None), size


async def test_a_limit_at_every_byte_is_never_passed() -> None:
    for max_bytes in range(len(WHOLE)):
        found, error = await read(WHOLE, limits=ReadLimits(max_bytes))
        assert isinstance(error, SizeLimit), max_bytes
        assert found.received_bytes <= max_bytes


@pytest.mark.parametrize(
    ("identity", "what"),
    [(IndexIdentity("s-2"), "scheme"), (IndexIdentity("s-1", b"x" * 16), "seed")],
)
async def test_an_answer_for_another_index(identity: IndexIdentity, what: str) -> None:
    found, error = await read(WHOLE, identity=identity)
    assert isinstance(error, Unfit)
    assert str(error) == what
    assert (found.seed, found.rows) == (None, [])
