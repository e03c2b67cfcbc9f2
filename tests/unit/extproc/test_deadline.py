"""One timer for the waits of a task: ends the overdue one and no other."""

from __future__ import annotations

import asyncio

import pytest

from epp.extproc.deadline import Deadline
from tests.virtual_time import run_virtual


def test_an_overdue_wait_is_cancelled_in_its_time_and_says_so() -> None:
    async def waits() -> list[float]:
        loop, deadline = asyncio.get_running_loop(), Deadline(2.0)
        lasted = []
        for limit_s in (2.0, 2.0, 5.0):  # the timer goes on
            began_s = loop.time()
            deadline.arm(limit_s)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.Event().wait()
            assert deadline.take()
            lasted.append(loop.time() - began_s)
        deadline.close()
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        return lasted

    for lasted_s, limit_s in zip(run_virtual(waits()), (2.0, 2.0, 5.0), strict=True):
        assert limit_s <= lasted_s <= limit_s + 2.0, "a period late at most"


def test_a_wait_that_ended_in_time_leaves_the_task_alone() -> None:
    async def wait() -> None:
        deadline = Deadline(1.0)
        deadline.arm(1.0)
        await asyncio.sleep(0.5)
        deadline.disarm()
        await asyncio.sleep(50.0)  # the timer looks many times
        assert not deadline.take()
        deadline.close()

    run_virtual(wait())


async def test_a_cancel_from_outside_is_not_taken_for_ours() -> None:
    taken: list[bool] = []

    async def wait() -> None:
        deadline = Deadline(30.0)
        deadline.arm(30.0)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            taken.append(deadline.take())
            raise
        finally:
            deadline.close()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert taken == [False]
