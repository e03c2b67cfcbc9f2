"""Siblings with a good certificate and bad intentions, or bad luck: the start goes on, cold or with what
was whole, in bounded time and memory."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from epp.siblings import wire
from epp.siblings.reader import ReadLimits
from tests.integration.siblings.rig import (
    PATIENT,
    QUICK,
    SCHEME,
    SEED,
    Source,
    Talk,
    ask,
    misbehaving,
    serving,
)
from tests.unit.siblings.test_wire import row

FIRST = row(3, "p0")
ROW = b"".join(wire.encode_row(FIRST))
HELLO = wire.encode_header(wire.Hello(wire.VERSION, SEED, SCHEME, 5))
WHOLE = HELLO + ROW + ROW + wire.encode_header(wire.End(2))


def says(data: bytes) -> Talk:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        writer.close()
        await writer.wait_closed()

    return talk


def raw_header(**fields: object) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return len(body).to_bytes(4, "big") + body


CUTS = [0, 3, 10, len(HELLO), len(HELLO) + 9, len(HELLO + ROW) - 1, len(HELLO + ROW), len(WHOLE) - 1]


@pytest.mark.parametrize("size", CUTS)
async def test_a_snapshot_that_breaks_off_is_used_as_far_as_its_rows_are_whole(
    certificates: Path, size: int
) -> None:
    async with misbehaving(says(WHOLE[:size]), certificates) as port:
        found = await ask(certificates, port)
    greeted = size >= len(HELLO)
    whole_rows = max(0, size - len(HELLO)) // len(ROW)
    assert (found.outcome, len(found.rows)) == ("cut" if greeted else "unreachable", whole_rows)
    assert found.seed == (SEED if greeted else None)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        ROW,
        HELLO + HELLO,
        HELLO + ROW + wire.encode_header(wire.End(2)),
        HELLO + ROW * 6,
        HELLO + ROW + (5).to_bytes(4, "big") + b"nope!",
        HELLO + ROW + raw_header(type="row", records=-5),
        HELLO + ROW + raw_header(type="unheard"),
        HELLO + ROW + (64 << 20).to_bytes(4, "big"),
        raw_header(type="hello", version=1, seed=b"short", scheme=SCHEME, endpoints=1),
        raw_header(type="hello", version=1, seed=SEED, scheme=SCHEME, endpoints=2**40),
        raw_header(type="hello", version=1, seed=SEED, scheme=7, endpoints=1),
    ],
)
async def test_a_malformed_snapshot_is_not_used_at_all(certificates: Path, data: bytes) -> None:
    async with misbehaving(says(data), certificates) as port, serving(Source([FIRST]), certificates) as good:
        found = await ask(certificates, port)
        assert (found.outcome, found.rows, found.seed) == ("malformed", (), None)
        found = await ask(certificates, port, good.port)  # and the next sibling gets its chance
        assert (found.outcome, len(found.rows)) == ("complete", 1)


@pytest.mark.parametrize(
    "data",
    [
        wire.encode_header(wire.Hello(wire.VERSION + 1, SEED, SCHEME, 5)) + ROW,
        wire.encode_header(wire.Refusal(9, "version")),
        wire.encode_header(wire.Refusal(9, "because I say so")),
    ],
)
async def test_an_unknown_version_is_refused_by_name(certificates: Path, data: bytes) -> None:
    async with misbehaving(says(data), certificates) as port:
        found = await ask(certificates, port)
    assert (found.outcome, found.rows, found.seed) == ("version", (), None)


async def test_promised_lengths_cost_no_memory(certificates: Path) -> None:
    """300 MB of columns are announced and never sent."""
    huge = wire.row_header(FIRST)
    announced = wire.encode_header(msgspec.structs.replace(huge, records=15_000_000))
    async with misbehaving(says(HELLO + ROW + announced + bytes(1_000)), certificates) as port:
        tracemalloc.start()
        try:
            found = await ask(certificates, port)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (found.outcome, len(found.rows)) == ("cut", 1)
    assert peak_bytes < 8 << 20


async def test_lengths_over_the_limit_are_refused_before_they_are_read(certificates: Path) -> None:
    huge = msgspec.structs.replace(wire.row_header(FIRST), records=wire.MAX_RECORDS)
    async with misbehaving(says(HELLO + ROW + wire.encode_header(huge)), certificates) as port:
        found = await ask(certificates, port, settings=replace(PATIENT, limits=ReadLimits(1 << 20)))
    assert (found.outcome, len(found.rows)) == ("size_limit", 1)


def slow(data: bytes, pieces: asyncio.Queue[int]) -> Talk:
    """One byte at a time, each only when the test says so."""

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(len(data)):
            await pieces.get()
            writer.write(data[at : at + 1])
            await writer.drain()

    return talk


async def test_a_sibling_that_falls_silent_is_left(certificates: Path) -> None:
    pieces: asyncio.Queue[int] = asyncio.Queue()
    for _ in range(len(HELLO + ROW) + 10):
        pieces.put_nowait(1)
    async with misbehaving(slow(WHOLE, pieces), certificates) as port:
        found = await ask(certificates, port, settings=QUICK)
    assert (found.outcome, len(found.rows)) == ("cut", 1)


async def test_a_sibling_that_is_slow_for_ever_does_not_hold_up_the_start(certificates: Path) -> None:
    """Each read is quick enough; all together are not."""
    pieces: asyncio.Queue[int] = asyncio.Queue()

    async def feed() -> None:
        for _ in range(len(HELLO + ROW) + 3):
            pieces.put_nowait(1)
        while True:
            await asyncio.sleep(0.02)  # its slowness is what is tested
            pieces.put_nowait(1)

    feeding = asyncio.create_task(feed())
    long_row = row(10_000, "p9")
    data = HELLO + ROW + wire.encode_header(wire.row_header(long_row)) + bytes(200_000)
    async with misbehaving(slow(data, pieces), certificates) as port:
        found = await ask(certificates, port, settings=replace(PATIENT, total_s=3.0))
    feeding.cancel()
    assert (found.outcome, len(found.rows), found.seed) == ("cut", 1, SEED)
