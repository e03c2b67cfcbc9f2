"""PullFinished over real sockets: from an engine's publisher to the picker's record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from engine_plugin import pull_report
from engine_plugin.identity import EndpointId
from engine_plugin.pull_report import PullFinished
from engine_plugin.report_publisher import ReportPublisher
from epp.core.decision_record import PullState
from epp.core.types import PullReport
from epp.reports.subscriber import ReportSubscriber
from tests.unit.core.test_pull_lifecycle import busy_pool

BOUND_S = 20.0
HOST = "127.0.0.1"
A, B = EndpointId("a"), EndpointId("b")


def finished(pull_id: str, **changed: object) -> PullFinished:
    values: dict[str, object] = {
        "id": pull_id,
        "source": "10.0.0.2:7777",
        "asked_tokens": 3200,
        "received_tokens": 1600,
        "received_bytes": 1 << 20,
        "reason": "shortfall",
        "ms": 12.5,
    }
    return PullFinished(**(values | changed))  # type: ignore[arg-type]


class Listener:
    """A running subscriber and everything that it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[EndpointId, PullReport]] = []
        self.bad: list[EndpointId] = []
        self._news = asyncio.Event()
        self.subscriber = ReportSubscriber(self._on_report, self._on_bad)

    def _on_report(self, endpoint: EndpointId, report: PullReport) -> None:
        self.heard.append((endpoint, report))
        self._news.set()
        if report.decision_id == "fault":
            raise ZeroDivisionError("a fault of the picker")

    def _on_bad(self, endpoint: EndpointId) -> None:
        self.bad.append(endpoint)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def connected(self, publisher: ReportPublisher, endpoint: EndpointId, mark: str) -> None:
        """Publish until it is heard: a PUB socket drops what nobody has subscribed to yet."""

        def heard() -> bool:
            return any(e == endpoint and r.decision_id == mark for e, r in self.heard)

        async with asyncio.timeout(BOUND_S):
            while not heard():
                publisher.publish(finished(mark))
                self._news.clear()
                try:
                    await asyncio.wait_for(self._news.wait(), 0.02)
                except TimeoutError:
                    continue


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    running = asyncio.create_task(listener.subscriber.run())
    try:
        yield listener
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def publishers() -> AsyncIterator[Callable[[], tuple[ReportPublisher, str]]]:
    made: list[ReportPublisher] = []

    def make() -> tuple[ReportPublisher, str]:
        publisher = ReportPublisher()
        made.append(publisher)
        return publisher, str(publisher.bind(HOST))

    yield make
    for publisher in made:
        publisher.close()


Publishers = Callable[[], tuple[ReportPublisher, str]]


async def test_a_report_comes_with_the_endpoint_of_its_connection(publishers: Publishers) -> None:
    (first, first_port), (second, second_port) = publishers(), publishers()
    async with listening() as listener:
        for endpoint, port in ((A, first_port), (B, second_port)):
            listener.subscriber.upsert(endpoint, HOST)
            listener.subscriber.announce(endpoint, port)
        await listener.connected(first, A, "mark-a")
        await listener.connected(second, B, "mark-b")
        second.publish(finished("d1"))
        await listener.until(lambda: any(r.decision_id == "d1" for _, r in listener.heard))
    assert (B, PullReport("d1", "10.0.0.2:7777", 3200, 1600, 1 << 20, "shortfall", 12.5)) in listener.heard
    assert {r.decision_id for e, r in listener.heard if e == A} == {"mark-a"}


async def test_garbage_and_faults_end_nothing(publishers: Publishers) -> None:
    publisher, port = publishers()
    async with listening() as listener:
        listener.subscriber.upsert(A, HOST)
        listener.subscriber.announce(A, port)
        await listener.connected(publisher, A, "mark")
        socket = publisher._socket
        assert socket is not None
        hostile = (
            [b"pull"],
            [b"pull", b"\xc1"],
            [b"pull", msgspec.msgpack.encode({"id": "x"})],
            [b"pull", msgspec.msgpack.encode(finished("x", received_bytes=-1))],
            [b"pull", msgspec.msgpack.encode(finished("x" * 500))],
            [b"pull", msgspec.msgpack.encode(finished("x", ms=float("nan")))],
            [b"pulling", msgspec.msgpack.encode(finished("x"))],
            [b"pull", b"a", b"b"],
        )
        for frames in hostile:
            socket.send_multipart(frames)
        publisher.publish(finished("fault"))
        publisher.publish(finished("after"))
        await listener.until(lambda: listener.heard[-1][1].decision_id == "after")
    assert len(listener.bad) == len(hostile)
    assert {r.decision_id for _, r in listener.heard} == {"mark", "fault", "after"}


async def test_an_engine_that_comes_back_on_another_port_is_heard_again(publishers: Publishers) -> None:
    (old, old_port), (new, new_port) = publishers(), publishers()
    async with listening() as listener:
        listener.subscriber.upsert(A, HOST)
        listener.subscriber.announce(A, old_port)
        await listener.connected(old, A, "old")
        listener.subscriber.announce(A, old_port)
        listener.subscriber.announce(A, new_port)
        await listener.connected(new, A, "new")
        heard = len(listener.heard)
        listener.subscriber.remove(A)
        listener.subscriber.announce(A, new_port)  # of an endpoint that has left
        listener.subscriber.upsert(B, HOST)
        listener.subscriber.announce(B, old_port)
        await listener.connected(old, B, "last")
        assert {e for e, _ in listener.heard[heard:]} == {B}


@pytest.mark.parametrize("port", ["", "0", "65536", "x", "99999999", "\u0661"])
async def test_no_port_is_not_listened_to(port: str) -> None:
    async with listening() as listener:
        listener.subscriber.upsert(A, HOST)
        listener.subscriber.announce(A, port)
        assert listener.subscriber._wanted == {}


async def test_a_subscriber_that_has_not_started_remembers(publishers: Publishers) -> None:
    publisher, port = publishers()
    listener = Listener()
    listener.subscriber.upsert(A, HOST)
    listener.subscriber.announce(A, port)
    running = asyncio.create_task(listener.subscriber.run())
    await listener.connected(publisher, A, "mark")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_report_ends_the_pull_and_joins_the_record(publishers: Publishers) -> None:
    publisher, port = publishers()
    pool = busy_pool()
    decision = pool.ask()
    settled = asyncio.Event()

    def take(endpoint: EndpointId, report: PullReport) -> None:
        if pool.picker.pull_finished(report, endpoint):
            settled.set()

    subscriber = ReportSubscriber(take)
    subscriber.upsert(decision.computing, HOST)
    subscriber.announce(decision.computing, port)
    running = asyncio.create_task(subscriber.run())
    assert pool.picker.ledger.load(B).pulls_served == 1
    async with asyncio.timeout(BOUND_S):
        while not settled.is_set():  # until the subscription is in place; repetitions are ignored
            publisher.publish(finished(decision.decision_id))
            try:
                await asyncio.wait_for(settled.wait(), 0.02)
            except TimeoutError:
                continue
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert pool.picker.ledger.load(B).pulls_served == 0
    record = pool.picker.find_decision("r")
    assert record is not None
    assert record.pull_state is PullState.REPORTED
    assert record.report is not None
    assert (record.report.received_tokens, record.report.received_bytes) == (1600, 1 << 20)


def test_a_publisher_never_fails_its_engine() -> None:
    publisher = ReportPublisher()
    publisher.publish(finished("nobody is bound"))
    port = publisher.bind(HOST)
    for number in range(5000):
        publisher.publish(finished(f"nobody listens {number}"))
    other = ReportPublisher()
    with pytest.raises(OSError, match=f"{HOST}:{port}"):
        other.bind(HOST, port)
    other.close()
    publisher.close()
    publisher.publish(finished("closed"))


def test_the_codec_refuses_what_is_no_report() -> None:
    frames = pull_report.encode(finished("d"))
    assert pull_report.decode(frames) == finished("d")
    newer = msgspec.msgpack.encode(msgspec.structs.asdict(finished("d")) | {"tomorrow": 1})
    assert pull_report.decode([pull_report.TOPIC, newer]) == finished("d")
    for cut in range(len(frames[1])):
        with pytest.raises(pull_report.ReportError):
            pull_report.decode([frames[0], frames[1][:cut]])
    with pytest.raises(pull_report.ReportError):
        pull_report.decode([frames[0], frames[1] + b"x" * pull_report.MAX_REPORT_BYTES])
