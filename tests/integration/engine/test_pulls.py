"""Pulls between engines over the real transport: bytes that moved, reasons, and answers that stay right."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from engine_plugin import wire
from engine_plugin.identity import EndpointId
from epp.core.types import PullReport
from epp.reports.subscriber import ReportSubscriber
from tests.integration.engine.rig import (
    BLOCK,
    BLOCK_BYTES,
    BOUND_S,
    EngineClient,
    StartEngine,
    prompt_ids,
    until,
)

RECEIVED = wire.PULL_RECEIVED_BYTES_TOTAL
SERVED = wire.PULL_SERVED_BYTES_TOTAL


async def served(producer: EngineClient, consumer: EngineClient) -> tuple[int, int]:
    """Bytes of the pair, counted at the producer and at the consumer."""
    return (
        int(await producer.counter(SERVED, peer=consumer.instance)),
        int(await consumer.counter(RECEIVED, peer=producer.instance)),
    )


async def test_pull_moves_exactly_the_missing_blocks_and_the_answer_is_equal(
    start_engine: StartEngine,
) -> None:
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(100 * BLOCK + 5)
    at_home = await owner.complete(prompt, max_tokens=16)
    pulled = await other.complete(prompt, max_tokens=16, transfer=owner.source("id-7"))
    assert pulled.text == at_home.text == (await owner.complete(prompt, max_tokens=16)).text
    report = pulled.report
    assert (report["pull_reason"], report["kv_request_id"]) == ("ok", "id-7")
    assert (report["pulled_tokens"], report["pulled_bytes"]) == (100 * BLOCK, 100 * BLOCK_BYTES)
    assert (report["computed_tokens"], report["device_hit_tokens"], report["restored_tokens"]) == (5, 0, 0)
    assert pulled.cached_tokens == 100 * BLOCK
    assert await served(owner, other) == (100 * BLOCK_BYTES, 100 * BLOCK_BYTES)
    for name in (wire.SESSION_SETUP_SECONDS, wire.TRANSFER_SECONDS):
        assert (await other.counter(f"{name}_count"), await owner.counter(f"{name}_count")) == (1, 0)
    assert await other.counter(wire.CPU_TIER_FILL) > 0
    assert await other.counter(wire.HANDSHAKES_UNFINISHED_TOTAL) == 0
    await owner.quiet()
    await other.quiet()


async def test_only_what_no_own_tier_has_is_pulled(start_engine: StartEngine) -> None:
    """20 blocks in the device tier, 30 more in the own CPU tier, the last 50 from the peer."""
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(100 * BLOCK + 1)
    await owner.complete(prompt)
    await other.complete(prompt[: 50 * BLOCK + 1])
    await other.reset()
    await other.complete(prompt[: 20 * BLOCK + 1])
    reply = await other.complete(prompt, transfer=owner.source())
    tokens = [reply.report[name] for name in ("device_hit_tokens", "restored_tokens", "pulled_tokens")]
    assert tokens == [20 * BLOCK, 30 * BLOCK, 50 * BLOCK]
    assert reply.report["pulled_bytes"] == 50 * BLOCK_BYTES
    assert reply.text == (await owner.complete(prompt)).text


async def test_local_prefix_needs_no_transfer(start_engine: StartEngine) -> None:
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(30 * BLOCK)
    await owner.complete(prompt)
    await other.complete(prompt)
    reply = await other.complete(prompt, transfer=owner.source())
    assert (reply.report["pull_reason"], reply.report["device_hit_tokens"]) == ("local", 29 * BLOCK)
    assert await served(owner, other) == (0, 0)


async def test_evicted_device_blocks_come_back_from_the_own_cpu_tier(start_engine: StartEngine) -> None:
    owner = await start_engine(device_tokens=2048, max_model_len=2048)
    prompt = prompt_ids(90 * BLOCK)
    first = await owner.complete(prompt)
    await owner.complete(prompt_ids(120 * BLOCK, salt=9))  # evicts it from the device tier
    again = await owner.complete(prompt)
    assert again.text == first.text
    device_hits, restored = again.report["device_hit_tokens"], again.report["restored_tokens"]
    assert device_hits + restored == 89 * BLOCK
    assert restored > 80 * BLOCK
    assert (again.report["pulled_tokens"], again.report["corrupt_blocks"]) == (0, 0)


async def test_pulled_blocks_can_be_pulled_on(start_engine: StartEngine) -> None:
    """A pull leaves a copy that serves the next engine, also after the first owner has gone cold."""
    first, second, third = await start_engine(), await start_engine(), await start_engine()
    prompt = prompt_ids(40 * BLOCK + 1)
    answer = await first.complete(prompt)
    await second.complete(prompt, transfer=first.source())
    await first.reset(cpu_too=True)
    reply = await third.complete(prompt, transfer=second.source())
    assert (reply.text, reply.report["pulled_tokens"]) == (answer.text, 40 * BLOCK)


async def test_partly_held_prefix_is_pulled_as_far_as_it_goes(start_engine: StartEngine) -> None:
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(50 * BLOCK)
    await owner.complete(prompt[: 10 * BLOCK + 1])
    reply = await other.complete(prompt, transfer=owner.source())
    assert (reply.report["pulled_tokens"], reply.report["asked_blocks"]) == (10 * BLOCK, 49)
    assert reply.report["computed_tokens"] == 40 * BLOCK
    assert reply.text == (await owner.complete(prompt)).text


async def test_a_source_that_holds_nothing_or_is_not_there_costs_only_the_recompute(
    start_engine: StartEngine,
) -> None:
    cold, engine = await start_engine(), await start_engine()
    prompt = prompt_ids(20 * BLOCK)
    miss = await engine.complete(prompt, transfer=cold.source())
    assert (miss.report["pull_reason"], miss.report["computed_tokens"]) == ("miss", 20 * BLOCK)
    nobody = {wire.REMOTE_KV_SOURCE: wire.kv_source_params("id", "127.0.9.250", 9)}
    gone = await engine.complete(prompt_ids(20 * BLOCK, salt=1), transfer=nobody)
    assert (gone.report["pull_reason"], gone.report["computed_tokens"]) == ("unreachable", 20 * BLOCK)
    await engine.quiet()


async def test_itself_or_nonsense_as_source_is_ignored_and_counted(start_engine: StartEngine) -> None:
    engine = await start_engine()
    itself = await engine.complete(prompt_ids(40), transfer=engine.source())
    nonsense = await engine.complete(
        prompt_ids(40, salt=1), transfer={wire.REMOTE_KV_SOURCE: {wire.KV_REQUEST_ID: "x"}}
    )
    assert itself.report["pull_reason"] == "self"
    assert nonsense.report["pull_reason"] == "malformed"
    assert nonsense.report["pull_detail"] == "remote_kv_source.remote_host"
    assert await engine.counter(wire.PULLS_TOTAL, reason="self") == 1
    assert await engine.counter(wire.PULLS_TOTAL, reason="malformed") == 1


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"hash_seed": "another"}, "seed_fp"), ({"block_size": 2 * BLOCK}, "block_size_tokens")],
)
async def test_an_engine_that_hashes_otherwise_is_refused_by_name_on_both_sides(
    start_engine: StartEngine, changed: dict[str, Any], field: str
) -> None:
    owner, other = await start_engine(), await start_engine(**changed)
    prompt = prompt_ids(20 * BLOCK)
    answer = await owner.complete(prompt)
    reply = await other.complete(prompt, transfer=owner.source())
    assert reply.text == answer.text
    assert (reply.report["pull_reason"], reply.report["pull_detail"]) == ("refused_identity", field)
    assert reply.report["computed_tokens"] == 20 * BLOCK
    for engine in (owner, other):
        assert await engine.counter(wire.PEER_REFUSED_TOTAL, reason=field) >= 1


async def test_torn_block_is_noticed_and_recomputed(start_engine: StartEngine) -> None:
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(20 * BLOCK)
    answer = await owner.complete(prompt)
    async with owner.session.post(f"{owner.base}/faults", json={"corrupt_block": 7}) as response:
        assert response.status == 200
    reply = await other.complete(prompt, transfer=owner.source())
    assert reply.text == answer.text
    assert (reply.report["pull_reason"], reply.report["pulled_tokens"]) == ("checksum", 7 * BLOCK)
    assert reply.report["computed_tokens"] == 13 * BLOCK
    await other.quiet()


async def test_wrong_byte_in_the_own_cpu_tier_is_found_by_the_restore(start_engine: StartEngine) -> None:
    engine = await start_engine()
    prompt = prompt_ids(20 * BLOCK)
    answer = await engine.complete(prompt)
    await engine.reset()
    parts = engine.running.engine.parts
    # the fifth block ever stored in an empty tier is in its fifth slot
    engine.running.assembly.tier.array[4, BLOCK_BYTES // 2] ^= 1
    reply = await engine.complete(prompt)
    assert reply.text == answer.text
    assert (reply.report["restored_tokens"], reply.report["corrupt_blocks"]) == (4 * BLOCK, 1)
    assert reply.report["computed_tokens"] == 16 * BLOCK
    assert parts.counters.corrupt_blocks == 1
    await engine.reset()
    healed = await engine.complete(prompt)
    assert (healed.text, healed.report["restored_tokens"]) == (answer.text, 19 * BLOCK)


async def held_pull(owner: EngineClient, other: EngineClient, prompt: list[int]) -> asyncio.Task[object]:
    """A request on `other` whose pull stands still after its first chunk."""
    faults = owner.running.assembly.faults
    assert faults is not None
    faults.hold_after_chunks = 1
    task: asyncio.Task[object] = asyncio.create_task(
        other.complete(prompt, transfer=owner.source(), request_id="held")
    )
    async with asyncio.timeout(30):
        await faults.holding.wait()
    return task


async def test_source_whose_mover_dies_in_mid_pull_costs_only_the_recompute(
    start_engine: StartEngine,
) -> None:
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(400 * BLOCK)  # 12.5 MiB: several chunks
    answer = await owner.complete(prompt)
    task = await held_pull(owner, other, prompt)
    pid = owner.running.assembly.transport.mover_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    reply = await task
    report = await other.report("held")
    assert getattr(reply, "text", None) == answer.text
    assert report["pull_reason"] not in ("ok", None)
    assert (report["pulled_tokens"], report["computed_tokens"]) == (0, 400 * BLOCK)
    assert report["asked_blocks"] == 399
    await other.quiet()  # quarantine has ended, too
    await owner.quiet()


async def test_client_that_leaves_in_mid_pull_leaves_nothing_behind(start_engine: StartEngine) -> None:
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(400 * BLOCK)
    await owner.complete(prompt)
    task = await held_pull(owner, other, prompt)
    task.cancel()
    scheduler = other.running.engine.parts.scheduler
    await until(lambda: scheduler.idle)  # while the pull still stands
    assert other.running.engine.parts.cache.device.in_use == 0
    faults = owner.running.assembly.faults
    assert faults is not None
    faults.proceed.set()
    await other.quiet()
    await owner.quiet()
    assert (await other.report("held"))["state"] == "aborted"
    faults.hold_after_chunks = None
    late = await other.complete(prompt, transfer=owner.source())
    assert late.report["restored_tokens"] + late.report["pulled_tokens"] == 399 * BLOCK


async def test_the_end_of_every_pull_is_published(start_engine: StartEngine) -> None:
    """On the port that `kvpull_engine_info` names; also for a source that was not even asked."""
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(100 * BLOCK + 5)
    await owner.complete(prompt)
    assert f'reports_port="{other.running.reports_port}"' in await other.metrics()
    heard: dict[str, PullReport] = {}
    news = asyncio.Event()

    def take(_: EndpointId, report: PullReport) -> None:
        heard[report.decision_id] = report
        news.set()

    subscriber = ReportSubscriber(take)
    subscriber.upsert(EndpointId("other"), other.host)
    subscriber.announce(EndpointId("other"), str(other.running.reports_port))
    running = asyncio.create_task(subscriber.run())
    async with asyncio.timeout(BOUND_S):
        while not heard:  # names itself as the source: a report each time, until one is heard
            await other.complete(prompt_ids(BLOCK * 2, salt=9), transfer=other.source("self"))
            try:
                await asyncio.wait_for(news.wait(), 0.02)
            except TimeoutError:
                continue
        await other.complete(prompt, transfer=owner.source("d-1"))
        await other.complete(prompt, transfer=owner.source("d-2"))
        dead = {wire.REMOTE_KV_SOURCE: wire.kv_source_params("d-3", owner.host, 1)}
        await other.complete(prompt_ids(10 * BLOCK, salt=3), transfer=dead)
        while "d-3" not in heard:
            news.clear()
            await news.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (heard["self"].reason, heard["self"].asked_tokens) == ("self", 0)
    pulled = heard["d-1"]
    assert (pulled.reason, pulled.source) == ("ok", f"{owner.host}:{owner.running.p2p_port}")
    assert (pulled.asked_tokens, pulled.received_tokens) == (100 * BLOCK, 100 * BLOCK)
    assert pulled.received_bytes == 100 * BLOCK_BYTES
    assert pulled.duration_ms > 0
    assert (heard["d-2"].reason, heard["d-2"].asked_tokens) == ("local", 0)
    assert (heard["d-3"].asked_tokens, heard["d-3"].received_tokens) == (9 * BLOCK, 0)
    assert heard["d-3"].reason != "ok"


async def test_a_throttled_source_is_slow_and_recovers(start_engine: StartEngine) -> None:
    """At a byte a second the pull runs out of time and the prompt is computed; without, it moves."""
    owner, other = await start_engine(), await start_engine(pull_base_s=0.3, pull_max_s=0.3)
    prompt = prompt_ids(20 * BLOCK + 1)
    at_home = await owner.complete(prompt)
    assert (await owner.post("/faults", {"throttle_bytes_per_s": 1})).status == 200
    slow = await other.complete(prompt, transfer=owner.source("slow"))
    assert (slow.report["pull_reason"], slow.report["pulled_tokens"]) == ("timeout", 0)
    assert slow.report["computed_tokens"] == 20 * BLOCK + 1
    assert (await owner.post("/faults", {"throttle_bytes_per_s": None})).body["throttle_bytes_per_s"] is None
    third = await start_engine()
    moved = await third.complete(prompt, transfer=owner.source("fast"))
    assert (moved.report["pull_reason"], moved.report["pulled_tokens"]) == ("ok", 20 * BLOCK)
    assert slow.text == moved.text == at_home.text


async def test_a_pull_takes_at_least_what_was_declared(start_engine: StartEngine) -> None:
    """As a step takes the model's time: the engine reports no less, and the bytes are the same."""
    owner, other = await start_engine(), await start_engine()
    prompt = prompt_ids(32 * BLOCK + 1)
    await owner.complete(prompt)
    source = "{}:{}".format(*owner.p2p)
    size = 32 * BLOCK_BYTES
    declared = await other.post("/faults", {"pull_paces": {source: [100.0, size / 0.2]}})
    assert declared.body["pull_paces"] == {source: [100.0, size / 0.2]}
    pulled = await other.complete(prompt, transfer=owner.source())
    assert pulled.report["pulled_tokens"] == 32 * BLOCK
    assert pulled.report["pull_ms"] >= 300.0
    for wrong in ({source: [1.0]}, {source: [-1.0, 1.0]}, {source: [1.0, 0.0]}, [1.0]):
        assert (await other.post("/faults", {"pull_paces": wrong})).status == 400
