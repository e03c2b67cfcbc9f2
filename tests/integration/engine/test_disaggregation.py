"""Prefill and decode on two engines, through both connectors: what moves, who computes, what fails softly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_plugin import wire
from tests.integration.engine.rig import (
    BLOCK,
    BLOCK_BYTES,
    EngineClient,
    Reply,
    StartEngine,
    prompt_ids,
    until,
)


def decoder_of(request_id: str) -> dict[str, Any]:
    """Params of the prefill leg (offloading connector)."""
    return {wire.REMOTE_DECODER: {wire.KV_REQUEST_ID: request_id}}


def prefiller(engine: EngineClient, request_id: str) -> dict[str, Any]:
    """Params of the decode leg (offloading connector)."""
    return {wire.REMOTE_PREFILLER: wire.kv_source_params(request_id, *engine.p2p)}


def handed_over(reply: Reply) -> tuple[int, int, int]:
    report = reply.report
    return report["handed_over_tokens"], report["handed_over_bytes"], report["computed_tokens"]


async def both_ends(producer: EngineClient, consumer: EngineClient) -> list[float]:
    return [
        await producer.counter(wire.PULL_SERVED_BYTES_TOTAL, peer=consumer.instance),
        await consumer.counter(wire.PULL_RECEIVED_BYTES_TOTAL, peer=producer.instance),
    ]


@pytest.mark.parametrize("decode_first", [True, False])
async def test_offloading_legs_in_any_order(start_engine: StartEngine, decode_first: bool) -> None:
    prefill, decode, alone = await start_engine(), await start_engine(), await start_engine()
    prompt = prompt_ids(60 * BLOCK + 3)
    first = asyncio.create_task(prefill.complete(prompt, max_tokens=9, transfer=decoder_of("pd-1")))
    if not decode_first:
        await first
    answer = await decode.complete(prompt, max_tokens=20, transfer=prefiller(prefill, "pd-1"))
    leg = await first
    assert answer.text == (await alone.complete(prompt, max_tokens=20)).text
    assert handed_over(answer) == (60 * BLOCK, 60 * BLOCK_BYTES, 3)
    assert (answer.report["pulled_tokens"], answer.report["pull_reason"]) == (0, "ok")
    assert (leg.report["supplied_tokens"], leg.report["computed_tokens"]) == (60 * BLOCK, 60 * BLOCK + 3)
    assert leg.body["usage"]["completion_tokens"] == 1
    assert await both_ends(prefill, decode) == [60 * BLOCK_BYTES] * 2
    await prefill.quiet()
    await decode.quiet()


async def test_decode_leg_waits_for_a_prefill_that_is_still_computing(start_engine: StartEngine) -> None:
    """The look-up is at the prefiller before its prompt has been computed, and it does not miss."""
    prefill, decode = await start_engine(time_scale=1.0), await start_engine()
    prompt = prompt_ids(200 * BLOCK + 1)
    waiting = asyncio.create_task(decode.complete(prompt, transfer=prefiller(prefill, "pd-2")))
    stats = prefill.running.assembly.transport.stats
    await until(lambda: stats.lookups == 1)
    leg = await prefill.complete(prompt, transfer=decoder_of("pd-2"))
    answer = await waiting
    assert leg.report["computed_tokens"] == 200 * BLOCK + 1
    assert handed_over(answer) == (200 * BLOCK, 200 * BLOCK_BYTES, 1)


async def test_nixl_legs_in_order(start_engine: StartEngine) -> None:
    prefill, decode, alone = await start_engine(), await start_engine(), await start_engine()
    prompt = prompt_ids(60 * BLOCK + 3)
    leg = await prefill.complete(prompt, max_tokens=9, transfer=wire.nixl_prefill_params())
    params = leg.body[wire.KV_TRANSFER_PARAMS]
    assert (params[wire.DO_REMOTE_PREFILL], params[wire.DO_REMOTE_DECODE]) == (True, False)
    assert (params[wire.REMOTE_HOST], params[wire.REMOTE_PORT]) == prefill.p2p
    assert params[wire.REMOTE_ENGINE_ID] == prefill.instance
    assert len(params[wire.REMOTE_BLOCK_IDS]) == 60
    assert leg.body["usage"]["completion_tokens"] == 1
    answer = await decode.complete(prompt, max_tokens=20, transfer=params)
    assert answer.text == (await alone.complete(prompt, max_tokens=20)).text
    assert handed_over(answer) == (60 * BLOCK, 60 * BLOCK_BYTES, 3)
    assert answer.body[wire.KV_TRANSFER_PARAMS] is None
    await prefill.quiet()
    await decode.quiet()


async def test_prefill_leg_pulls_the_history_that_a_decoder_made(start_engine: StartEngine) -> None:
    """Second turn: the prefiller has the first prompt; prompt and answer are pulled from the decoder."""
    prefill, decode = await start_engine(), await start_engine()
    prompt = prompt_ids(60 * BLOCK)
    await prefill.complete(prompt, transfer=decoder_of("turn-1"))
    answer = await decode.complete(prompt, max_tokens=81, transfer=prefiller(prefill, "turn-1"))
    generated = (await decode.post("/tokenize", {"prompt": answer.text, "add_special_tokens": False})).body
    assert generated["count"] == 81
    history = prompt + generated["tokens"]
    second = history + prompt_ids(40, salt=5)
    made = (len(history) - 1) // BLOCK - 60
    assert made == 5
    leg = await prefill.complete(second, transfer=decode.source("turn-2") | decoder_of("turn-2"))
    reply = await decode.complete(second, transfer=prefiller(prefill, "turn-2"))
    assert leg.report["device_hit_tokens"] == 60 * BLOCK
    assert (leg.report["pulled_tokens"], leg.report["pulled_bytes"]) == (made * BLOCK, made * BLOCK_BYTES)
    assert leg.report["computed_tokens"] == len(second) - (60 + made) * BLOCK
    new_blocks = (len(second) - 1) // BLOCK - (60 + made)
    assert handed_over(reply)[:2] == (new_blocks * BLOCK, new_blocks * BLOCK_BYTES)
    assert reply.text == (await (await start_engine()).complete(second)).text


async def test_prefill_leg_that_is_aborted_releases_the_waiting_decode_leg(start_engine: StartEngine) -> None:
    """The prefill leg leaves the queue of a busy engine; the decode leg computes instead of waiting."""
    prefill, decode = await start_engine(max_num_seqs=1, time_scale=0.1), await start_engine()
    prompt = prompt_ids(30 * BLOCK)
    busy = asyncio.create_task(prefill.complete(prompt_ids(50, salt=1), max_tokens=8000))
    scheduler = prefill.running.engine.parts.scheduler
    await until(lambda: scheduler.running == 1)
    leg = asyncio.create_task(prefill.complete(prompt, transfer=decoder_of("pd-3")))
    await until(lambda: scheduler.waiting == 1)
    waiting = asyncio.create_task(decode.complete(prompt, transfer=prefiller(prefill, "pd-3")))
    stats = prefill.running.assembly.transport.stats
    await until(lambda: stats.lookups == 1)
    leg.cancel()
    answer = await waiting
    assert (answer.report["pull_reason"], answer.report["computed_tokens"]) == ("miss", 30 * BLOCK)
    assert not busy.done()
    busy.cancel()
    await asyncio.gather(leg, busy, return_exceptions=True)


async def test_prefill_leg_that_never_comes_costs_a_bounded_wait(start_engine: StartEngine) -> None:
    prefill, decode = await start_engine(), await start_engine(supply_wait_s=0.2)
    prompt = prompt_ids(30 * BLOCK)
    answer = await decode.complete(prompt, transfer=prefiller(prefill, "never"))
    assert (answer.report["pull_reason"], answer.report["computed_tokens"]) == ("miss", 30 * BLOCK)
    assert answer.text == (await prefill.complete(prompt)).text


async def test_prompt_without_a_full_block_hands_nothing_over(start_engine: StartEngine) -> None:
    prefill, decode = await start_engine(), await start_engine()
    leg = await prefill.complete(prompt_ids(5), transfer=decoder_of("short"))
    answer = await decode.complete(prompt_ids(5), transfer=prefiller(prefill, "short"))
    assert leg.report["supplied_tokens"] == 0
    assert handed_over(answer) == (0, 0, 5)


async def test_supply_that_nobody_fetches_is_given_up(start_engine: StartEngine) -> None:
    prefill = await start_engine(supply_keep_s=0.05)
    await prefill.complete(prompt_ids(30 * BLOCK), transfer=decoder_of("lost"))
    await prefill.quiet()


async def test_supply_outlives_eviction_pressure(start_engine: StartEngine) -> None:
    """Blocks that wait for their decode leg stay in a CPU tier that everything else runs through."""
    prefill = await start_engine(cpu_tokens=80 * BLOCK, device_tokens=80 * BLOCK, max_model_len=80 * BLOCK)
    decode = await start_engine()
    prompt = prompt_ids(50 * BLOCK + 1)
    await prefill.complete(prompt, transfer=decoder_of("kept"))
    for salt in range(1, 4):
        await prefill.complete(prompt_ids(70 * BLOCK, salt))
    answer = await decode.complete(prompt, transfer=prefiller(prefill, "kept"))
    assert handed_over(answer) == (50 * BLOCK, 50 * BLOCK_BYTES, 1)
    await prefill.quiet()
