"""Limits of one engine: context length, queue, what is switched off."""

from __future__ import annotations

import asyncio

from tests.integration.engine.rig import StartEngine, prompt_ids, until

TEXT = "/v1/completions"


async def test_longest_prompt_and_answer_that_fit(start_engine: StartEngine) -> None:
    engine = await start_engine(device_tokens=256, max_model_len=256)
    reply = await engine.complete(prompt_ids(200), max_tokens=56)
    assert reply.body["usage"]["total_tokens"] == 256


async def test_without_faults_enabled_there_is_no_fault_page(start_engine: StartEngine) -> None:
    engine = await start_engine(enable_faults=False)
    assert (await engine.post("/faults", {"hold_replay": True})).status == 404


async def test_full_queue_is_a_503(start_engine: StartEngine) -> None:
    """One runs (for long: a step takes minutes), one waits, the third is refused at once."""
    engine = await start_engine(max_num_seqs=1, max_num_queued=1, time_scale=1e4)
    body = {"model": "m", "prompt": prompt_ids(50), "max_tokens": 1}
    scheduler = engine.running.engine.parts.scheduler
    held = [asyncio.create_task(engine.post(TEXT, body))]
    await until(lambda: scheduler.running == 1)
    held.append(asyncio.create_task(engine.post(TEXT, body)))
    await until(lambda: scheduler.waiting == 1)
    reply = await engine.post(TEXT, body)
    assert (reply.status, reply.body["error"]["type"]) == (503, "ServiceUnavailableError")
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_errors_never_repeat_the_prompt(start_engine: StartEngine) -> None:
    engine = await start_engine(max_model_len=32)
    secret = "opensesame " * 100
    for body in ({"prompt": secret}, {"prompt": secret, "max_tokens": 0}, {"prompt": {"x": secret}}):
        reply = await engine.post(TEXT, {"model": "m"} | body)
        assert reply.status == 400
        assert "sesame" not in str(reply.body)
