"""A client that leaves, at any moment, leaves nothing pinned, queued or running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from deploy.local.engine.scheduler import Scheduler
from tests.integration.engine.rig import BLOCK, EngineClient, StartEngine, prompt_ids, until


async def leave_when(engine: EngineClient, moment: Callable[[Scheduler], bool]) -> None:
    """Start a long streamed request and drop its connection at `moment`."""
    body = {"model": "m", "prompt": prompt_ids(100 * BLOCK), "max_tokens": 4000, "stream": True}

    async def read() -> None:
        async with engine.session.post(f"{engine.base}/v1/completions", json=body) as response:
            await response.read()

    task = asyncio.create_task(read())
    scheduler = engine.running.engine.parts.scheduler
    await until(lambda: moment(scheduler))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_while_it_is_answered(start_engine: StartEngine) -> None:
    engine = await start_engine(time_scale=0.1)
    counters = engine.running.engine.parts.counters
    await leave_when(engine, lambda scheduler: counters.generation > 2)
    await engine.quiet()
    assert counters.finished_requests == {"abort": 1}
    again = await engine.complete(prompt_ids(100 * BLOCK))
    assert again.report["device_hit_tokens"] == 99 * BLOCK


async def test_while_it_waits_in_the_queue(start_engine: StartEngine) -> None:
    engine = await start_engine(max_num_seqs=1, time_scale=0.05)
    first = asyncio.create_task(engine.complete(prompt_ids(50, salt=1), max_tokens=200))
    scheduler = engine.running.engine.parts.scheduler
    await until(lambda: scheduler.running == 1)  # the first one waits too, for a moment
    await leave_when(engine, lambda scheduler: scheduler.waiting == 1)
    assert (await first).body["usage"]["completion_tokens"] == 200
    await engine.quiet()
    assert engine.running.engine.parts.counters.finished_requests == {"abort": 1, "length": 1}


@pytest.mark.parametrize("after_tokens", [0, 1])
async def test_non_streaming_request_is_aborted_too(start_engine: StartEngine, after_tokens: int) -> None:
    engine = await start_engine(time_scale=0.05)
    counters = engine.running.engine.parts.counters
    task = asyncio.create_task(engine.complete(prompt_ids(6000), max_tokens=2000))
    scheduler = engine.running.engine.parts.scheduler
    await until(lambda: scheduler.running == 1 and counters.generation >= after_tokens)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.quiet()
    assert counters.finished_requests == {"abort": 1}
    assert counters.generation < 2000


async def test_requests_that_do_not_fit_wait_for_room(start_engine: StartEngine) -> None:
    """Three prompts of 60 blocks, a device tier of 100: one after the other, all right."""
    engine = await start_engine(device_tokens=100 * BLOCK, max_model_len=100 * BLOCK)
    prompts = [prompt_ids(60 * BLOCK, salt) for salt in range(3)]
    replies = await asyncio.gather(*(engine.complete(prompt, max_tokens=9) for prompt in prompts))
    other = await start_engine()
    assert [r.text for r in replies] == [(await other.complete(p, max_tokens=9)).text for p in prompts]
    await engine.quiet()
