"""Turns at scraping: bounded in flight, hung endpoints apart, and no more than a share of the loop."""

from __future__ import annotations

import asyncio

from epp.endpoints.turns import MAX_IN_FLIGHT, MAX_SUSPECTS, Turns
from tests.virtual_time import run_virtual


async def test_so_many_at_once_and_hung_ones_hold_up_nobody_else() -> None:
    turns, inside, go = Turns(), {True: 0, False: 0}, asyncio.Event()

    async def scrape(suspect: bool) -> None:
        async with turns.turn(suspect=suspect):
            inside[suspect] += 1
            await go.wait()

    tasks = [asyncio.create_task(scrape(suspect)) for suspect in (True, False) for _ in range(200)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert inside == {True: MAX_SUSPECTS, False: MAX_IN_FLIGHT}
    go.set()
    await asyncio.gather(*tasks)
    assert inside == {True: 200, False: 200}


def test_starts_are_as_far_apart_as_their_share_allows() -> None:
    async def scrapes() -> list[float]:
        turns, starts = Turns(max_share=0.5), []
        turns.spent(2.0)

        async def scrape() -> None:
            async with turns.turn(suspect=False):
                starts.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(scrape() for _ in range(6)))
        return starts

    first_s, *later_s = run_virtual(scrapes())
    pauses = [round(start_s - first_s, 3) for start_s in later_s]
    assert pauses == [4.0, 8.0, 12.0, 16.0, 20.0]  # a cost by its share


async def test_nothing_spent_nothing_waited_for() -> None:
    turns = Turns()
    async with asyncio.timeout(30):
        for _ in range(1000):
            async with turns.turn(suspect=False):
                pass
