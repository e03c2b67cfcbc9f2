"""An order to pull, without a request: the blocks are there when the request comes."""

from __future__ import annotations

import asyncio

import pytest

from engine_plugin.protocol import Prefetched
from tests.engine.ordering import block_keys, order_pull
from tests.engine.pull_engines import BLOCK_BYTES, BLOCK_TOKENS, PullEngine, fresh, until

pytestmark = pytest.mark.timeout(900)


async def test_an_idle_engine_pulls_what_it_is_ordered_to(source: PullEngine, consumer: PullEngine) -> None:
    ids = fresh(20)
    source.complete(ids)
    own = source.complete(ids)
    received = consumer.metric("kvpull_pull_received_bytes_total")
    keys = [*block_keys(ids), *block_keys(fresh(2))]
    assert await order_pull(consumer, source, keys) == Prefetched(1, 20, 20 * BLOCK_BYTES, "ok")
    # its own figures reach an idle engine's page within a second
    now = received + 20 * BLOCK_BYTES
    await asyncio.to_thread(until, lambda: consumer.metric("kvpull_pull_received_bytes_total") == now)
    assert consumer.metric("kvpull_prefetch_orders_total", reason="ok") >= 1
    restored = consumer.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
    answer = await asyncio.to_thread(consumer.complete, ids)
    assert (answer.tokens, answer.cached) == (own.tokens, 20 * BLOCK_TOKENS)
    assert (
        consumer.metric("vllm:prompt_tokens_cached_by_source_total", source="host") - restored
        == 20 * BLOCK_TOKENS
    )
    assert consumer.metric("kvpull_pull_received_bytes_total") == now
    assert await order_pull(consumer, source, keys[:20]) == Prefetched(1, 20, 0, "ok")


async def test_what_nobody_holds_is_a_miss(source: PullEngine, consumer: PullEngine) -> None:
    missing = block_keys(fresh(3))
    assert await order_pull(consumer, source, missing) == Prefetched(1, 0, 0, "miss")
