"""Pulls between real vLLM engines: what moved, what it was worth, and that the answer is the source's own.

The oracle is the source's own cache hit (greedy): a recomputation may differ in the last bits inside one
engine.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_plugin.pull_report import PullFinished
from tests.engine.pull_engines import BLOCK_BYTES, BLOCK_TOKENS, PullEngine, fresh, source_params, until
from tests.engine.reports import Reports
from tests.engine.serving import ADAPTER

pytestmark = pytest.mark.timeout(900)


class Moved:
    """What an engine pulled between two looks at its metrics."""

    def __init__(self, engine: PullEngine) -> None:
        self._engine = engine
        self._before = self._look()

    def _look(self) -> tuple[float, float]:
        received = self._engine.metric("kvpull_pull_received_bytes_total")
        return received, self._engine.metric("vllm:prompt_tokens_cached_by_source_total", source="p2p")

    def __call__(self) -> tuple[int, int]:
        """Bytes received from peers, prompt tokens that vLLM says came from them."""
        received, tokens = self._look()
        return int(received - self._before[0]), int(tokens - self._before[1])


def test_a_pull_moves_the_prefix_and_answers_as_the_source_does(
    source: PullEngine, consumer: PullEngine, reports: Reports
) -> None:
    ids, moved = fresh(40), Moved(consumer)
    source.complete(ids)
    own = source.complete(ids)
    served = source.metric("kvpull_pull_served_bytes_total")
    pulled = consumer.complete(ids, params=consumer.pull_from(source, "pull-1"))
    assert pulled.tokens == own.tokens
    assert pulled.cached == 40 * BLOCK_TOKENS
    assert moved() == (40 * BLOCK_BYTES, 40 * BLOCK_TOKENS)
    for name in ("kvpull_session_setup_seconds_count", "kvpull_transfer_seconds_count"):
        assert consumer.metric(name) >= 1
    assert 0 < consumer.metric("kvpull_cpu_tier_fill_perc") <= 1
    shared = source.tier_rows() & consumer.tier_rows()
    assert len(shared) >= 40, "the blocks are not the source's, byte by byte"
    told = reports.of("pull-1")
    assert isinstance(told, PullFinished)
    assert told.source == f"127.0.0.1:{source.p2p_port}"
    assert (told.asked_tokens, told.received_tokens) == (40 * BLOCK_TOKENS, 40 * BLOCK_TOKENS)
    assert (told.received_bytes, told.reason) == (40 * BLOCK_BYTES, "ok")
    # an idle engine's figures: nobody asks the source for anything now
    until(lambda: source.metric("kvpull_pull_served_bytes_total") - served == 40 * BLOCK_BYTES)
    until(lambda: source.metric("kvpull_leases") == 0)


def test_without_a_source_it_is_computed(source: PullEngine, consumer: PullEngine) -> None:
    ids, moved = fresh(20), Moved(consumer)
    source.complete(ids)
    answer = consumer.complete(ids)
    assert len(answer.tokens) == 8
    assert answer.cached == 0
    assert moved() == (0, 0)


def test_only_what_is_missing_is_pulled(source: PullEngine, consumer: PullEngine, reports: Reports) -> None:
    ids, moved = fresh(30), Moved(consumer)
    consumer.complete(ids[: 10 * BLOCK_TOKENS])
    source.complete(ids)
    own = source.complete(ids)
    assert consumer.complete(ids, params=consumer.pull_from(source, "rest")).tokens == own.tokens
    assert moved() == (20 * BLOCK_BYTES, 20 * BLOCK_TOKENS)
    assert reports.of("rest").asked_tokens == 20 * BLOCK_TOKENS


def test_a_partial_hit_is_used_and_the_rest_computed(source: PullEngine, consumer: PullEngine) -> None:
    ids, moved = fresh(30), Moved(consumer)
    source.complete(ids[: 12 * BLOCK_TOKENS])
    pulled = consumer.complete(ids, params=consumer.pull_from(source))
    assert moved() == (12 * BLOCK_BYTES, 12 * BLOCK_TOKENS)
    source.complete(ids)
    assert pulled.tokens == source.complete(ids).tokens


def test_nothing_held_nothing_moved(source: PullEngine, consumer: PullEngine, reports: Reports) -> None:
    ids, moved = fresh(20), Moved(consumer)
    assert len(consumer.complete(ids, params=consumer.pull_from(source, "miss")).tokens) == 8
    assert moved() == (0, 0)
    told = reports.of("miss")
    assert (told.reason, told.asked_tokens, told.received_bytes) == ("miss", 20 * BLOCK_TOKENS, 0)


def test_what_is_here_is_not_pulled(source: PullEngine, consumer: PullEngine, reports: Reports) -> None:
    """From the device cache, then restored from the own CPU tier."""
    ids = fresh(20)
    source.complete(ids)
    consumer.complete(ids)
    own, moved = consumer.complete(ids), Moved(consumer)
    assert consumer.complete(ids, params=consumer.pull_from(source, "here")).tokens == own.tokens
    assert reports.of("here").reason == "local"
    restored = consumer.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
    consumer.clear_device()
    assert consumer.complete(ids, params=consumer.pull_from(source, "tier")).tokens == own.tokens
    assert reports.of("tier").reason == "local"
    now = consumer.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
    assert now - restored == 20 * BLOCK_TOKENS
    assert moved() == (0, 0)


def test_an_engine_is_not_its_own_source(consumer: PullEngine, reports: Reports) -> None:
    moved = Moved(consumer)
    assert len(consumer.complete(fresh(10), params=consumer.pull_from(consumer, "self")).tokens) == 8
    assert reports.of("self").reason == "self"
    assert moved() == (0, 0)


def test_generated_history_is_pulled_for_the_next_turn(source: PullEngine, consumer: PullEngine) -> None:
    """The source generated blocks 11 to 14; nobody ever prefilled them."""
    ids, moved = fresh(10, more=0), Moved(consumer)
    answer = source.complete(ids, tokens=4 * BLOCK_TOKENS + 1)
    history = [*ids, *answer.tokens]
    turn = [*history[: 14 * BLOCK_TOKENS], *fresh(1)]
    pulled = consumer.complete(turn, params=consumer.pull_from(source))
    assert moved() == (14 * BLOCK_BYTES, 14 * BLOCK_TOKENS)
    source.complete(turn)
    assert pulled.tokens == source.complete(turn).tokens


def test_a_salt_is_a_wall(source: PullEngine, consumer: PullEngine) -> None:
    ids, moved = fresh(16), Moved(consumer)
    source.complete(ids, salt="tenant-a")
    consumer.complete(ids, params=consumer.pull_from(source))
    consumer.complete(ids, params=consumer.pull_from(source), salt="tenant-b")
    assert moved() == (0, 0)
    own = source.complete(ids, salt="tenant-a")
    pulled = consumer.complete(ids, params=consumer.pull_from(source), salt="tenant-a")
    assert pulled.tokens == own.tokens
    assert moved() == (16 * BLOCK_BYTES, 16 * BLOCK_TOKENS)


def test_an_adapter_is_a_wall(source: PullEngine, consumer: PullEngine) -> None:
    """Its name is part of every block's; the base model's blocks are other blocks."""
    ids, moved = fresh(16), Moved(consumer)
    source.complete(ids, model=ADAPTER)
    consumer.complete(ids, params=consumer.pull_from(source))
    assert moved() == (0, 0)
    own = source.complete(ids, model=ADAPTER)
    pulled = consumer.complete(ids, params=consumer.pull_from(source), model=ADAPTER)
    assert pulled.tokens == own.tokens
    assert own.tokens != source.complete(ids).tokens, "the adapter changes nothing"
    assert moved() == (16 * BLOCK_BYTES, 16 * BLOCK_TOKENS)


def test_eight_pulls_at_once(source: PullEngine, consumer: PullEngine) -> None:
    """Two of them of the same prefix."""
    prompts, moved = [fresh(12) for _ in range(7)], Moved(consumer)
    prompts.append(prompts[0])
    for ids in prompts:
        source.complete(ids)
    own = [source.complete(ids).tokens for ids in prompts]
    with ThreadPoolExecutor(8) as threads:
        pulled = list(
            threads.map(lambda ids: consumer.complete(ids, params=consumer.pull_from(source)), prompts)
        )
    assert [answer.tokens for answer in pulled] == own
    received, _ = moved()
    assert received in (7 * 12 * BLOCK_BYTES, 8 * 12 * BLOCK_BYTES)


def test_prefill_hands_over_to_decode_with_both_legs_at_once(
    source: PullEngine, consumer: PullEngine
) -> None:
    ids, moved = fresh(20), Moved(consumer)
    prefill = {"remote_decoder": {"kv_request_id": "pd-1"}}
    decode = {"remote_prefiller": {"kv_request_id": "pd-1", "remote_host": "127.0.0.1"}}
    decode["remote_prefiller"]["remote_port"] = source.p2p_port  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(consumer.complete, ids, params=decode)
        source.complete(ids, params=prefill, tokens=1)
        decoded = waiting.result()
    assert moved() == (20 * BLOCK_BYTES, 20 * BLOCK_TOKENS)
    assert decoded.tokens == source.complete(ids).tokens


def test_a_warm_prefiller_hands_over_at_once(source: PullEngine, consumer: PullEngine) -> None:
    """S-E13: the prefill leg finds everything in its own cache and computes nothing."""
    ids = fresh(20)
    own = source.complete(ids)
    moved = Moved(consumer)
    prefill = {"remote_decoder": {"kv_request_id": "pd-warm"}}
    with ThreadPoolExecutor(1) as threads:
        decode = {
            "remote_prefiller": source_params("127.0.0.1", source.p2p_port, "pd-warm")["remote_kv_source"]
        }
        waiting = threads.submit(consumer.complete, ids, params=decode)
        assert source.complete(ids, params=prefill, tokens=1).cached >= 19 * BLOCK_TOKENS
        decoded = waiting.result()
    assert moved() == (20 * BLOCK_BYTES, 20 * BLOCK_TOKENS)
    assert decoded.tokens == own.tokens


def test_a_prefiller_pulls_the_history_and_hands_over_the_rest(
    source: PullEngine, consumer: PullEngine
) -> None:
    """Turn 1 was decoded on the consumer; the prefiller pulls it, computes the new part, hands that over."""
    ids = fresh(10, more=0)
    history = [*ids, *consumer.complete(ids, tokens=3 * BLOCK_TOKENS + 1).tokens]
    turn = [*history[: 13 * BLOCK_TOKENS], *fresh(5)]
    prefilled, decoded = Moved(source), Moved(consumer)
    prefill = {"remote_decoder": {"kv_request_id": "pd-2"}} | source.pull_from(consumer, "pd-2-history")
    decode = {
        "remote_prefiller": {
            "kv_request_id": "pd-2",
            "remote_host": "127.0.0.1",
            "remote_port": source.p2p_port,
        }
    }
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(consumer.complete, turn, params=decode)
        source.complete(turn, params=prefill, tokens=1)
        answer = waiting.result()
    assert prefilled() == (13 * BLOCK_BYTES, 13 * BLOCK_TOKENS)
    assert decoded() == (5 * BLOCK_BYTES, 5 * BLOCK_TOKENS)
    assert answer.tokens == source.complete(turn).tokens
