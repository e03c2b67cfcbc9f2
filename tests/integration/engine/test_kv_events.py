"""What the engine says about its cache is what its cache holds, in vLLM's own format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.integration.engine.event_stream import Mirror, Subscriber, events_of, truth
from tests.integration.engine.rig import BLOCK, EngineClient, StartEngine, prompt_ids

# fields of a real engine's events (vLLM 0.32, recorded), in their order
STORED_FIELDS = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
]
REMOVED_FIELDS = ["type", "block_hashes", "medium", "group_idx"]


@pytest.fixture
async def subscribe() -> AsyncIterator[Callable[[EngineClient], Subscriber]]:
    opened: list[Subscriber] = []

    def open_one(engine: EngineClient) -> Subscriber:
        opened.append(Subscriber(engine))
        return opened[-1]

    yield open_one
    for subscriber in opened:
        subscriber.close()


Subscribe = Callable[[EngineClient], Subscriber]


async def busy_life(engine: EngineClient) -> None:
    """Shared prefixes, evictions in both tiers, generated blocks, a salted prompt."""
    for salt in (0, 1, 0, 2, 3, 4, 1):
        await engine.complete(prompt_ids(40 * BLOCK + salt, salt), max_tokens=40)
    await engine.complete(prompt_ids(4 * BLOCK), cache_salt="tenant")


async def all_events(engine: EngineClient, subscriber: Subscriber) -> list[dict[str, Any]]:
    await subscriber.ask_replay(0)
    return [event for _, payload in await subscriber.replayed() for event in events_of(payload)]


async def test_stored_minus_removed_is_exactly_the_cache(
    start_engine: StartEngine, subscribe: Subscribe
) -> None:
    engine = await start_engine(device_tokens=1600, max_model_len=1600, cpu_tokens=2400)
    subscriber, mirror = subscribe(engine), Mirror()
    joined = await subscriber.joined()
    await busy_life(engine)
    for _, payload in await subscriber.live(engine.running.assembly.publisher.batches - 1):
        mirror.apply(payload)
    assert mirror.tiers == truth(engine)
    assert mirror.removed > 50
    assert len(mirror.tiers["GPU"]) > 50
    assert len(mirror.tiers["CPU"]) > len(mirror.tiers["GPU"])
    assert joined >= 0


async def test_replay_gives_the_same_batches_as_live(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = await start_engine()
    subscriber = subscribe(engine)
    joined = await subscriber.joined()
    await busy_life(engine)
    live = await subscriber.live(engine.running.assembly.publisher.batches - 1)
    await subscriber.ask_replay(joined + 1)
    assert await subscriber.replayed() == live
    assert [sequence for sequence, _ in live] == list(range(joined + 1, joined + 1 + len(live)))
    await subscriber.ask_replay(0)
    assert [sequence for sequence, _ in await subscriber.replayed()] == list(range(live[-1][0] + 1))


async def test_held_replay_waits_and_is_then_answered(
    start_engine: StartEngine, subscribe: Subscribe
) -> None:
    engine = await start_engine()
    subscriber = subscribe(engine)
    await engine.complete(prompt_ids(5 * BLOCK))
    assert (await engine.post("/faults", {"hold_replay": True})).body["hold_replay"] is True
    await subscriber.ask_replay(0)
    assert await subscriber.replay_waits()
    await engine.post("/faults", {"hold_replay": False})
    mirror = Mirror()
    for _, payload in await subscriber.replayed():
        mirror.apply(payload)
    assert mirror.tiers == truth(engine)


async def test_malformed_replay_requests_do_not_stop_replays(
    start_engine: StartEngine, subscribe: Subscribe
) -> None:
    engine = await start_engine()
    subscriber = subscribe(engine)
    await engine.complete(prompt_ids(2 * BLOCK))
    for frames in ([b""], [b"", b"\x00"], [b"", b"\x00" * 8, b"more"], [b"no delimiter"]):
        await subscriber._replay.send_multipart(frames)
    await subscriber.ask_replay(0)
    assert len(await subscriber.replayed()) == engine.running.assembly.publisher.batches


async def test_form_of_the_events(start_engine: StartEngine, subscribe: Subscribe) -> None:
    """Device and CPU stores are whole chains, parent first, with the salt in block 0's extra keys only."""
    engine = await start_engine()
    subscriber = subscribe(engine)
    prompt = prompt_ids(3 * BLOCK)
    await engine.complete(prompt, max_tokens=1, cache_salt="tenant")
    device, cpu = await all_events(engine, subscriber)
    for event, medium in ((device, "GPU"), (cpu, "CPU")):
        assert list(event) == STORED_FIELDS
        assert (event["medium"], event["block_size"], event["token_ids"]) == (medium, BLOCK, prompt)
        assert event["extra_keys"] == [["tenant"], None, None]
        assert (event["parent_block_hash"], event["lora_id"], event["lora_name"]) == (None, None, None)
        assert (event["group_idx"], event["kv_cache_spec_kind"]) == (0, "full_attention")
    assert device["block_hashes"] == cpu["block_hashes"]


async def test_continued_chain_names_its_parent(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = await start_engine()
    subscriber = subscribe(engine)
    prompt = prompt_ids(4 * BLOCK)
    await engine.complete(prompt[: 2 * BLOCK], max_tokens=1)
    await engine.complete(prompt, max_tokens=1)
    first, _, second, _ = await all_events(engine, subscriber)
    assert second["parent_block_hash"] == first["block_hashes"][1]
    assert second["token_ids"] == prompt[2 * BLOCK :]


async def test_stock_form_of_cpu_events(start_engine: StartEngine, subscribe: Subscribe) -> None:
    """One event a block, children before parents, self-describing but without extra keys."""
    engine = await start_engine(stock_cpu_events=True)
    subscriber = subscribe(engine)
    await engine.complete(prompt_ids(20 * BLOCK), max_tokens=1, cache_salt="tenant")
    device, *cpu = await all_events(engine, subscriber)
    assert len(cpu) == 20
    assert all(list(event) == [f for f in STORED_FIELDS if f != "extra_keys"] for event in cpu)
    order = [event["block_hashes"][0] for event in cpu]
    assert sorted(order) == sorted(device["block_hashes"])
    assert order != device["block_hashes"]


async def test_eviction_is_announced_as_a_real_engine_does(
    start_engine: StartEngine, subscribe: Subscribe
) -> None:
    engine = await start_engine(device_tokens=320, max_model_len=320)
    subscriber = subscribe(engine)
    await engine.complete(prompt_ids(15 * BLOCK), max_tokens=1)
    await engine.complete(prompt_ids(15 * BLOCK, salt=1), max_tokens=1)
    events = await all_events(engine, subscriber)
    removed = [event for event in events if event["type"] == "BlockRemoved"]
    assert [list(event) for event in removed] == [REMOVED_FIELDS]
    first = events[0]["block_hashes"]
    assert removed[0]["block_hashes"] == first[:4:-1]  # tail first: ten of the fifteen
    assert removed[0]["medium"] == "GPU"


@pytest.mark.parametrize("cpu_too", [False, True])
async def test_reset_clears_and_tells_again_what_the_cpu_tier_kept(
    start_engine: StartEngine, subscribe: Subscribe, cpu_too: bool
) -> None:
    engine = await start_engine()
    subscriber, mirror = subscribe(engine), Mirror()
    await busy_life(engine)
    await engine.reset(cpu_too=cpu_too)
    await engine.complete(prompt_ids(2 * BLOCK, salt=7), max_tokens=1)
    await subscriber.ask_replay(0)
    for _, payload in await subscriber.replayed():
        mirror.apply(payload)
    assert mirror.cleared == 1
    assert mirror.tiers == truth(engine)
    assert (len(mirror.tiers["CPU"]) > 100) is not cpu_too


async def test_pulled_and_restored_blocks_are_announced(
    start_engine: StartEngine, subscribe: Subscribe
) -> None:
    owner, other = await start_engine(), await start_engine()
    subscriber, mirror = subscribe(other), Mirror()
    prompt = prompt_ids(30 * BLOCK + 1)
    await owner.complete(prompt)
    await other.complete(prompt, max_tokens=1, transfer=owner.source())
    await subscriber.ask_replay(0)
    for _, payload in await subscriber.replayed():
        mirror.apply(payload)
    assert mirror.tiers == truth(other)
    assert [len(mirror.tiers[tier]) for tier in ("CPU", "GPU")] == [30, 30]


async def test_decoder_of_the_picker_understands_the_events(
    start_engine: StartEngine, subscribe: Subscribe
) -> None:
    """The field names and types are JSON-clean: no bytes, no tuples, whole 64-bit hashes."""
    engine = await start_engine()
    subscriber = subscribe(engine)
    await busy_life(engine)
    events = await all_events(engine, subscriber)
    assert json.loads(json.dumps(events)) == events
    hashes = [value for event in events for value in event.get("block_hashes", ())]
    assert all(0 <= value < 1 << 64 for value in hashes)
    assert max(hashes) > 1 << 60
