"""A body on its way in: order, limits, and who is told to stop reading."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from sidecar.http.body import HIGH_WATER_BYTES, Body
from sidecar.http.message import BodyOverLimit, HttpFault, PeerGone


class Flow:
    """Counts as a socket would: paused or not."""

    paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[bytes | HttpFault | None] = []
        self.full: Body | None = None  # what to hold at the first piece

    def write(self, piece: bytes) -> None:
        self.got.append(piece)
        if self.full is not None:
            self.full.hold()

    def flush(self) -> None: ...

    def end(self) -> None:
        self.got.append(None)

    def fail(self, fault: HttpFault) -> None:
        self.got.append(fault)


async def test_pieces_are_read_in_order_and_the_end_is_empty() -> None:
    body = Body(Flow())
    reading = asyncio.create_task(body.read())
    await asyncio.sleep(0)
    body.feed(b"a")
    assert await reading == b"a"
    body.feed(b"b")
    body.feed(b"c")
    body.end()
    assert [await body.read(), await body.read()] == [b"bc", b""]


async def test_a_body_nobody_reads_stops_its_connection() -> None:
    flow = Flow()
    body = Body(flow)
    body.feed(b"x" * HIGH_WATER_BYTES)
    assert not flow.paused
    body.feed(b"x")
    assert flow.paused
    assert len(await body.read()) == HIGH_WATER_BYTES + 1
    assert not flow.paused


async def test_the_whole_of_it_is_not_stopped_but_bounded() -> None:
    flow = Flow()
    body = Body(flow)
    body.feed(b"x" * (HIGH_WATER_BYTES + 1))
    taking = asyncio.create_task(body.whole(2 * HIGH_WATER_BYTES))
    await asyncio.sleep(0)
    assert not flow.paused
    body.feed(b"y" * (HIGH_WATER_BYTES - 1))
    assert not flow.paused
    body.end()
    assert len(await taking) == 2 * HIGH_WATER_BYTES
    over = Body(flow)
    taking = asyncio.create_task(over.whole(2))
    await asyncio.sleep(0)
    over.feed(b"xxx")
    with pytest.raises(BodyOverLimit):
        await taking


async def test_a_body_in_tiny_pieces_costs_its_bytes() -> None:
    """A list of a million objects of two bytes would be forty times as large."""
    body, count = Body(Flow()), 100_000
    taking = asyncio.create_task(body.whole(2 * count))
    await asyncio.sleep(0)
    tracemalloc.start()
    try:
        for n in range(count):
            body.feed(b"%02d" % (n % 100))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    body.end()
    assert await taking == b"".join(b"%02d" % (n % 100) for n in range(count))
    assert peak_bytes < 4 * 2 * count


async def test_a_broken_body_gives_what_there_was_and_then_its_fault() -> None:
    body = Body(Flow())
    body.feed(b"a")
    body.fail(PeerGone())
    assert await body.read() == b"a"
    with pytest.raises(PeerGone):
        await body.read()
    broken = Body(Flow())
    broken.fail(PeerGone())
    with pytest.raises(PeerGone):
        await broken.whole(10)


def test_a_pipe_gets_everything_once_and_holds_the_connection() -> None:
    flow, sink = Flow(), Sink()
    body = Body(flow)
    body.feed(b"a")
    body.feed(b"b")
    body.pipe(sink, congested=True)
    assert (sink.got, flow.paused) == ([b"ab"], True)
    body.release()
    body.feed(b"c")
    assert not flow.paused
    body.hold()
    assert flow.paused
    body.release()
    body.end()
    assert sink.got == [b"ab", b"c", None]


def test_a_sink_that_is_full_at_once_stays_so() -> None:
    flow, sink = Flow(), Sink()
    body = sink.full = Body(flow)
    body.feed(b"x" * (HIGH_WATER_BYTES + 1))
    body.pipe(sink)
    assert flow.paused


@pytest.mark.parametrize("broken", [False, True])
def test_a_pipe_of_a_body_that_has_ended(broken: bool) -> None:
    sink, fault = Sink(), PeerGone()
    body = Body(Flow())
    body.feed(b"a")
    if broken:
        body.fail(fault)
    else:
        body.end()
    body.pipe(sink)
    assert sink.got == [b"a", fault if broken else None]


def test_after_its_end_a_body_leaves_the_connection_alone() -> None:
    """The connection may serve another call by then."""
    flow = Flow()
    body = Body(flow)
    body.end()
    body.hold()
    assert not flow.paused
    flow.paused = True
    body.release()
    assert flow.paused


def test_a_discarded_body_keeps_nothing_and_flows() -> None:
    flow = Flow()
    body = Body(flow)
    body.feed(b"x" * (HIGH_WATER_BYTES + 1))
    body.discard()
    assert not flow.paused
    body.feed(b"x" * (HIGH_WATER_BYTES + 1))
    assert not flow.paused


async def test_it_says_once_that_it_is_wanted() -> None:
    asked: list[bool] = []
    body = Body(Flow(), lambda: asked.append(True))
    assert body.unwanted
    body.feed(b"a")
    await body.read()
    body.end()
    await body.read()
    assert (asked, body.unwanted) == ([True], False)
