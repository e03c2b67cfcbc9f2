"""Blocks pulled by a picker's order, over the encrypted channel and NIXL, into another engine's CPU tier."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from engine_plugin import wire
from engine_plugin.transport import Limits, PrefetchOrder
from engine_plugin.transport.orders import PrefetchOrders
from tests.integration.engine.rig import BLOCK, BLOCK_BYTES, BOUND_S, EngineClient, StartEngine, prompt_ids

PATIENT = Limits(connect_s=BOUND_S, handshake_s=BOUND_S)
TOKENS = 64 * BLOCK


@contextlib.asynccontextmanager
async def picker(key: bytes = b"k" * 32) -> AsyncIterator[PrefetchOrders]:
    orders = PrefetchOrders(key, PATIENT)
    try:
        yield orders
    finally:
        await orders.stop()


def order(source: EngineClient, tokens: list[int], salt: str = "") -> PrefetchOrder:
    return PrefetchOrder(source.p2p, "turn-1", (), BOUND_S, tokens, salt)


async def received(engine: EngineClient) -> float:
    return await engine.counter(wire.PULL_RECEIVED_BYTES_TOTAL)


@pytest.mark.parametrize("salt", ["", "tenant"])
async def test_ordered_blocks_are_there_before_the_next_turn(start_engine: StartEngine, salt: str) -> None:
    """The turn is then restored from the own CPU tier: nothing is pulled, and the answer is the owner's."""
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(TOKENS + 1)
    more = {"cache_salt": salt} if salt else {}
    first = await owner.complete(prompt, **more)
    async with picker() as orders:
        result = await orders.order(other.p2p, order(owner, prompt, salt))
        assert (result.blocks, result.received_bytes, result.reason) == (64, 64 * BLOCK_BYTES, "ok")
        again = await orders.order(other.p2p, order(owner, prompt, salt))
        assert (again.blocks, again.received_bytes) == (64, 0), "what is there is not moved twice"
    turn = await other.complete(prompt, **more)
    assert (turn.report["restored_tokens"], turn.report["pulled_tokens"]) == (TOKENS, 0)
    assert turn.text == first.text
    assert await received(other) == 64 * BLOCK_BYTES == await owner.counter(wire.PULL_SERVED_BYTES_TOTAL)


async def test_another_salt_finds_nothing(start_engine: StartEngine) -> None:
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(TOKENS + 1)
    await owner.complete(prompt, cache_salt="tenant")
    async with picker() as orders:
        result = await orders.order(other.p2p, order(owner, prompt, "stranger"))
    assert (result.blocks, result.received_bytes, result.reason) == (0, 0, "miss")
    assert await received(other) == 0


async def test_a_source_that_is_gone_and_a_tier_that_is_full_are_reasons(start_engine: StartEngine) -> None:
    owner, small = await start_engine(), await start_engine(cpu_tokens=4 * BLOCK)
    prompt = prompt_ids(TOKENS + 1)
    await owner.complete(prompt)
    async with picker() as orders:
        gone = PrefetchOrder(("127.0.9.250", 7777), "turn-1", (), BOUND_S, prompt)
        assert (await orders.order(small.p2p, gone)).reason == "unreachable"
        full = await orders.order(small.p2p, order(owner, prompt))
    assert (full.blocks, full.received_bytes, full.reason) == (0, 0, "no_slots")
    assert small.running.assembly.parts.cache.cpu.in_use == 0
