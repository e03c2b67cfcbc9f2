"""One timer for the waits of a task: ends the overdue one and no other."""

from __future__ import annotations

import asyncio

import pytest

from epp.extproc.deadline import Deadline


async def test_an_overdue_wait_is_cancelled_and_says_so() -> None:
    deadline = Deadline(0.01)
    for _ in range(3):  # the timer goes on
        deadline.arm(0.01)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        assert deadline.take()
    deadline.close()
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_wait_that_ended_in_time_leaves_the_task_alone() -> None:
    deadline = Deadline(0.001)
    deadline.arm(0.001)
    deadline.disarm()
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, late.set)  # the timer looks many times before
    await late.wait()
    assert not deadline.take()
    deadline.close()


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
