"""Waiting requests over a pool whose room a test decides: who gets in, who does not, and no leaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from epp.core.errors import NoEndpoints, PickerError, Saturated, WaitedTooLong
from epp.core.flow.bands import BandSettings, FlowSettings
from epp.flow.admission import Asking, Shedding
from epp.flow.controller import FlowController


class Pool:
    """`room` requests may be booked or on their way; None: no endpoint."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.room: int | None = 0
        self.booked = 0
        self.waits: list[tuple[str, float]] = []
        self.log: list[str] = []
        self.controller = FlowController(
            FlowSettings(**settings),
            self.saturation,
            on_wait=lambda asking, outcome, waited_s: self.waits.append((outcome, waited_s)),
            clock=lambda: self.now_s,
            pause=lambda _: asyncio.sleep(0),
        )

    def saturation(self, now_s: float, unbooked: int) -> float | None:
        if self.room is None:
            return None
        return (self.booked + unbooked) / self.room if self.room else 1.0

    def ask(self, name: str, priority: int = 0, **more: Any) -> asyncio.Task[str]:
        return asyncio.create_task(self._request(name, Asking(priority, **more)))

    async def _request(self, name: str, asking: Asking) -> str:
        try:
            async with self.controller.admitted(asking):
                await asyncio.sleep(0)  # its prompt is tokenised
                self.booked += 1
                self.log.append(name)
        except PickerError as error:
            return error.reason
        return "ok"

    def give(self, room: int | None) -> None:
        self.room = room
        self.controller.wake()

    async def waiting(self, requests: int) -> None:
        async with asyncio.timeout(30):
            while len(self.controller.queue) != requests:  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool()
    yield made
    assert (len(made.controller.queue), made.controller.unbooked) == (0, 0)
    assert not made.controller._waiting


async def test_with_room_nobody_waits(pool: Pool) -> None:
    pool.room = 10
    assert await pool.ask("a") == "ok"
    assert pool.waits == [("dispatched", 0.0)]


async def test_they_wait_for_room_and_the_most_important_goes_first(pool: Pool) -> None:
    asks = [pool.ask(name, priority) for name, priority in (("low", -1), ("mid", 0), ("high", 5))]
    await pool.waiting(3)
    for room in (1, 2, 3):
        pool.give(room)
        await pool.waiting(3 - room)
    assert await asyncio.gather(*asks) == ["ok"] * 3
    assert pool.log == ["high", "mid", "low"]


async def test_a_burst_does_not_slip_through_before_it_is_booked(pool: Pool) -> None:
    """The negative control of `unbooked`: all ask in one step, while nothing is booked yet."""
    pool.room = 4
    asks = [pool.ask(str(number)) for number in range(50)]
    await pool.waiting(46)
    assert pool.booked <= 4
    for _ in range(60):
        await asyncio.sleep(0)
    assert (pool.booked, len(pool.controller.queue)) == (4, 46)
    pool.give(100)
    assert await asyncio.gather(*asks) == ["ok"] * 50
    assert pool.log == [str(number) for number in range(50)]


async def test_a_band_has_its_own_longest_wait() -> None:
    pool = Pool(bands={5: BandSettings(ttl_s=5.0), 0: BandSettings()})
    short, usual = pool.ask("short", 5), pool.ask("usual", 0)
    await pool.waiting(2)
    pool.now_s += 5.1
    pool.controller.wake()
    assert await short == WaitedTooLong.reason
    assert len(pool.controller.queue) == 1, "the other has 60 s"
    pool.give(1)
    assert await usual == "ok"


async def test_whose_time_is_over_is_told_so(pool: Pool) -> None:
    ask = pool.ask("a")
    await pool.waiting(1)
    pool.now_s += 59.9
    pool.controller.wake()
    await pool.waiting(1)
    pool.now_s += 0.2
    pool.controller.wake()
    assert await ask == WaitedTooLong.reason
    assert pool.waits == [(WaitedTooLong.reason, pytest.approx(60.1))]


async def test_an_empty_pool_is_503_and_not_429() -> None:
    pool = Pool(no_endpoint_ttl_s=1.0)
    pool.room = None
    asks = [pool.ask("a"), pool.ask("b")]
    await pool.waiting(2)
    pool.now_s += 1.5
    pool.controller.wake()
    assert await asyncio.gather(*asks) == [NoEndpoints.reason] * 2
    late = pool.ask("c")
    await pool.waiting(1)
    pool.give(1)  # scaled from zero in time
    assert await late == "ok"


async def test_a_full_queue_is_429_at_once() -> None:
    pool = Pool(default_band=BandSettings(max_requests=1))
    first = pool.ask("a")
    await pool.waiting(1)
    assert await pool.ask("b") == Saturated.reason
    pool.give(1)
    assert await first == "ok"


async def test_a_client_that_leaves_waits_no_longer_and_keeps_no_room(pool: Pool) -> None:
    asks = [pool.ask(name) for name in "abc"]
    await pool.waiting(3)
    asks[1].cancel()
    await pool.waiting(2)
    pool.give(1)
    asks[0].cancel()  # in the moment it was let through
    with pytest.raises(asyncio.CancelledError):
        await asks[0]
    assert await asks[2] == "ok"
    assert pool.log == ["c"]
    assert sorted(outcome for outcome, _ in pool.waits) == ["cancelled", "cancelled", "dispatched"]


async def test_a_request_that_fails_after_it_was_let_through_gives_its_room_back(pool: Pool) -> None:
    pool.room = 1
    admitted = pool.controller.admitted(Asking())
    await admitted.__aenter__()
    assert pool.controller.unbooked == 1
    error = RuntimeError("its prompt could not be tokenised")
    assert not await admitted.__aexit__(RuntimeError, error, None)
    assert await pool.ask("next") == "ok"


async def test_room_that_nobody_tells_of_is_found_by_the_tick(pool: Pool) -> None:
    running = asyncio.create_task(pool.controller.run())
    ask = pool.ask("a")
    await pool.waiting(1)
    pool.room = 1
    assert await ask == "ok"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_flows_are_served_by_what_they_have_cost() -> None:
    from epp.core.flow.bands import Fairness

    pool = Pool(default_band=BandSettings(fairness=Fairness.PROGRAM_AWARE))
    pool.controller.note_served(Asking(flow="greedy"), 1e6)
    asks = [pool.ask("g", flow="greedy"), pool.ask("m", flow="modest")]
    await pool.waiting(2)
    pool.give(1)
    await pool.waiting(1)
    pool.give(2)
    assert await asyncio.gather(*asks) == ["ok", "ok"]
    assert pool.log == ["m", "g"]


# --- without flow control ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("saturation", "priority", "refused"),
    [
        (1.0, -1, True),
        (1.7, -3, True),
        (0.99, -1, False),
        (1.0, 0, False),
        (5.0, 4, False),
        (None, -1, False),
    ],
)
async def test_only_what_may_be_shed_is_shed(saturation: float | None, priority: int, refused: bool) -> None:
    shedding = Shedding(lambda now_s, unbooked: saturation, lambda: 0.0)
    admitted = shedding.admitted(Asking(priority))
    if refused:
        with pytest.raises(Saturated, match="may be shed"):
            await admitted.__aenter__()
    else:
        await admitted.__aenter__()
        await admitted.__aexit__(None, None, None)
    assert shedding.shed == refused
