"""Blocks pulled by a picker's order, over the encrypted channel and NIXL, into another engine's CPU tier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from engine_plugin import wire
from engine_plugin.identity import EndpointId, format_address
from engine_plugin.transport import Limits, PrefetchOrder
from engine_plugin.transport.orders import PrefetchOrders
from epp.core.next_turn import NextTurns, PrefetchAsk, PrefetchSettings
from epp.orders.sender import PrefetchSender
from tests.integration.engine.rig import (
    BLOCK,
    BLOCK_BYTES,
    BOUND_S,
    EngineClient,
    StartEngine,
    prompt_ids,
    until,
)

PATIENT = Limits(connect_s=BOUND_S, handshake_s=BOUND_S)
TOKENS = 64 * BLOCK


@contextlib.asynccontextmanager
async def picker(key: bytes = b"k" * 32) -> AsyncIterator[PrefetchOrders]:
    orders = PrefetchOrders((key,), PATIENT)
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


class Ordering(NextTurns):
    """Orders what it is told to, once."""

    def __init__(self, *asks: PrefetchAsk) -> None:
        super().__init__(PrefetchSettings(deadline_s=BOUND_S), lambda _: None)
        self._wanted, self.ended_orders = list(asks), set[str]()

    def take(self) -> list[PrefetchAsk]:
        taken, self._wanted = self._wanted, []
        return taken

    def finished(self, order_id: str) -> None:
        self.ended_orders.add(order_id)


def ask(order_id: str, source: str, target: str, tokens: list[int]) -> PrefetchAsk:
    ends = EndpointId("s"), EndpointId("t")
    return PrefetchAsk(order_id, *ends, source, target, tokens, None, None, len(tokens), 1.0)


async def test_the_pickers_orders_are_carried_out_and_every_one_is_ended(start_engine: StartEngine) -> None:
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(TOKENS)
    await owner.complete([*prompt, 7])
    source, target = format_address(owner.p2p), format_address(other.p2p)
    turns = Ordering(
        ask("good", source, target, prompt),
        ask("nobody there", source, "127.0.9.250:7777", prompt),
        ask("no address", "nonsense", target, prompt),
    )
    sender = PrefetchSender(lambda: turns, (b"k" * 32,))
    running = asyncio.create_task(sender.run())
    try:
        await until(lambda: len(turns.ended_orders) == 3)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert dict(sender.ended) == {"ok": 1, "unreachable": 1, "no_address": 1}
    assert (sender.blocks, sender.received_bytes) == (64, 64 * BLOCK_BYTES)
    assert await received(other) == 64 * BLOCK_BYTES
