"""The clock of tests that are about timers."""

from __future__ import annotations

import asyncio

import pytest

from tests.virtual_time import run_virtual


def test_hours_pass_at_once_and_in_order() -> None:
    async def scenario() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def wait(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append((name, loop.time()))

        await asyncio.gather(wait("late", 7200.0), wait("early", 0.25), wait("at once", 0.0))
        return seen

    assert run_virtual(scenario()) == [("at once", 0.0), ("early", 0.25), ("late", 7200.0)]


def test_a_wait_without_an_end_is_an_error() -> None:
    async def scenario() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer"):
        run_virtual(scenario())


def test_a_deadline_comes_in_its_time() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600.0):
                await asyncio.Event().wait()
        return loop.time()

    assert run_virtual(scenario()) == pytest.approx(600.0)
