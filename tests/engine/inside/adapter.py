"""What the adapter does with vLLM's real classes, case by case; prints `ok <name>` for each.

python -m tests.engine.inside.adapter      # in vLLM's environment
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_plugin.vllm.engine_identity import UnsupportedCache
from engine_plugin.vllm.spec import PullOffloadingSpec
from engine_plugin.vllm.tier_config import TierConfigError
from tests.engine.inside import orders
from tests.engine.inside.node import BLOCK, Node, content_of, keys_of, make_config, nodes, until


def a_pull_brings_the_source_s_bytes() -> None:
    with nodes() as (source, consumer):
        keys = keys_of(0, 12)
        source.store(keys)
        context = consumer.request(source.pull_params(), keys)
        assert consumer.found(context, keys) == 12
        assert consumer.load(context, keys) == [content_of(key) for key in keys]
        assert dict(consumer.tier._service.stats.received_bytes).popitem()[1] == 12 * BLOCK
        until(lambda: source.index.leases == 0)
        assert not consumer.manager.has_pending_work() or not consumer.tier.has_pending_work()
        consumer.finish(context)


def a_request_without_a_source_finds_nothing() -> None:
    with nodes() as (source, consumer):
        keys = keys_of(0, 4)
        source.store(keys)
        assert consumer.found(consumer.request(None, keys), keys) == 0
        assert consumer.tier._service.stats.asked_blocks == 0


def stored_events_name_parents_first() -> None:
    with nodes() as (source, consumer):
        keys = keys_of(0, 30)
        source.store(keys)
        context = consumer.request(source.pull_params(), keys)
        consumer.found(context, keys)
        for node in (source, consumer):
            stored = [key for event in node.manager.take_events() if not event.removed for key in event.keys]
            assert stored == keys


def what_a_peer_is_reading_is_not_evicted() -> None:
    with nodes({"blocks": 32}) as (source, consumer):
        keys = keys_of(0, 8)
        source.store(keys)
        context = consumer.request(source.pull_params(), keys)
        consumer.look(context, keys)
        consumer.step()
        until(lambda: source.index.leases == 1)
        for round_ in range(6):
            assert source.store(keys_of(1000 * (round_ + 1), 12)) == 12
        assert source.store(keys_of(9000, 25)) == 0  # 24 others fit beside the pinned ones
        assert consumer.found(context, keys) == 8
        assert consumer.load(context, keys) == [content_of(key) for key in keys]
        until(lambda: source.index.leases == 0)
        assert source.store(keys_of(9000, 32)) == 32


def what_a_peer_has_read_counts_as_used() -> None:
    with nodes({"blocks": 16}) as (source, consumer):
        old, young = keys_of(0, 8), keys_of(100, 8)
        source.store(old)
        source.store(young)
        context = consumer.request(source.pull_params(), old)
        assert consumer.found(context, old) == 8
        until(lambda: source.index.leases == 0)
        assert source.store(keys_of(200, 8)) == 8
        assert all(key in source.index for key in old)
        assert not any(key in source.index for key in young)


def slots_that_a_peer_may_still_write_into_are_set_aside() -> None:
    """The source's mover freezes in the middle, so nobody knows what it will still write; the consumer gives
    up, computes, and gets its slots back in time."""
    impatient = {"blocks": 16, "max_extra_ttft_s": 1.0}
    with nodes({"faults": ["hold_after_chunks=0"]}, impatient) as (source, consumer):
        keys = keys_of(0, 10)
        source.store(keys)
        context = consumer.request(source.pull_params(), keys)
        freeze_the_mover_once_it_moves(source, consumer, context, keys)
        assert consumer.found(context, keys) == 0
        assert consumer.tier._policy.aside_blocks == 10
        assert consumer.free_blocks == 6
        assert consumer.store(keys) == 0  # ten do not fit beside what is set aside
        assert consumer.store(keys[:6]) == 6
        until(lambda: (consumer.step(), consumer.tier._policy.aside_blocks == 0)[1])
        assert consumer.free_blocks == 10
        assert consumer.store(keys_of(500, 16)) == 16
        assert consumer.manager.primary_tier._num_write_pending_chunks == 0


def freeze_the_mover_once_it_moves(source: Node, consumer: Node, context: Any, keys: list[bytes]) -> None:
    service = source.tier._service

    def moving() -> bool:
        consumer.look(context, keys)
        consumer.step()
        return service.stats is not None and service.stats.moves_out > 0

    until(moving)
    os.kill(service._transport.mover_pid, signal.SIGSTOP)


def a_reset_waits_for_what_may_still_be_written() -> None:
    with nodes({"faults": ["hold_after_chunks=0"]}, {"max_extra_ttft_s": 1.0}) as (source, consumer):
        keys = keys_of(0, 10)
        source.store(keys)
        context = consumer.request(source.pull_params(), keys)
        freeze_the_mover_once_it_moves(source, consumer, context, keys)
        consumer.manager.reset_cache()
        assert consumer.tier._service.quarantined_slots == 0
        assert not consumer.tier._jobs
        assert consumer.store(keys_of(50, 64)) == 64 or hasattr(consumer.manager, "on_reset_flushed")


def a_reset_of_the_source_voids_leases() -> None:
    with nodes() as (source, consumer):
        keys = keys_of(0, 6)
        source.store(keys)
        context = consumer.request(source.pull_params(), keys)
        consumer.look(context, keys)
        consumer.step()
        until(lambda: source.index.leases == 1)
        source.manager.reset_cache()
        assert consumer.found(context, keys) == 0
        assert consumer.free_blocks == consumer.blocks


def a_full_tier_gives_the_offer_back() -> None:
    with nodes(None, {"blocks": 8}) as (source, consumer):
        keys, others = keys_of(0, 6), keys_of(100, 8)
        source.store(keys)
        consumer.store(others)
        reader = consumer.request(None, others)
        consumer.manager.prepare_load(others, reader)  # all of it is being read
        context = consumer.request(source.pull_params(), keys)
        assert consumer.found(context, keys) == 0
        until(lambda: source.index.leases == 0)


def an_eviction_makes_room_for_a_pull() -> None:
    with nodes(None, {"blocks": 8}) as (source, consumer):
        keys = keys_of(0, 6)
        source.store(keys)
        consumer.store(keys_of(100, 8))
        context = consumer.request(source.pull_params(), keys)
        assert consumer.found(context, keys) == 6
        assert consumer.load(context, keys) == [content_of(key) for key in keys]


def a_request_that_goes_leaves_nothing_pinned() -> None:
    with nodes() as (source, consumer):
        keys = keys_of(0, 6)
        source.store(keys)
        context = consumer.request(source.pull_params(), keys)
        consumer.look(context, keys)
        consumer.step()
        consumer.finish(context)
        until(lambda: (consumer.step(), source.tier._service.stats.lookups >= 1)[1])
        until(lambda: (consumer.step(), source.index.leases == 0)[1])
        assert consumer.free_blocks == consumer.blocks


def a_thousand_requests_that_go_while_their_source_is_mute() -> None:
    """S-E03: every slot and pin is back afterwards."""
    with nodes({"faults": ["stall_lookup=1"]}) as (source, consumer):
        keys = keys_of(0, 6)
        source.store(keys)
        for at in range(1000):
            context = consumer.request(source.pull_params(f"gone-{at}"), keys)
            consumer.look(context, keys)
            consumer.step()
            consumer.finish(context)
        until(lambda: (consumer.step(), consumer.tier._pulls == {} and not consumer.tier._jobs)[1])
        until(lambda: (consumer.step(), (source.index.leases, source.index.pinned_blocks) == (0, 0))[1])
        assert consumer.free_blocks == consumer.blocks


def a_prefill_leg_that_computes_nothing_hands_over_all_the_same() -> None:
    """S-E13: its cache was warm, so not one block is stored for it."""
    with nodes({"blocks": 32}) as (source, consumer):
        keys = keys_of(0, 8)
        source.store(keys)
        decode = {"remote_prefiller": source.pull_params("warm")["remote_kv_source"]}
        waiting = consumer.request(decode, keys)
        consumer.look(waiting, keys)
        consumer.step()
        leg = source.request({"remote_decoder": {"kv_request_id": "warm"}}, keys)
        assert source.store(keys, leg) == 0
        source.finish(leg)
        assert consumer.found(waiting, keys) == 8
        assert consumer.load(waiting, keys) == [content_of(key) for key in keys]
        until(lambda: source.index.pinned_blocks == 0)


def a_prefill_leg_s_blocks_wait_pinned_for_the_decode_leg() -> None:
    with nodes({"blocks": 32}) as (source, consumer):
        keys = keys_of(0, 8)
        source.store(keys[:3])
        decode = {"remote_prefiller": source.pull_params("pd")["remote_kv_source"]}
        waiting = consumer.request(decode, keys)
        consumer.look(waiting, keys)
        consumer.step()
        leg = source.request({"remote_decoder": {"kv_request_id": "pd"}}, keys)
        source.store(keys, leg)
        source.finish(leg)
        assert source.index.pinned_blocks == 8
        assert consumer.found(waiting, keys) == 8
        assert consumer.load(waiting, keys) == [content_of(key) for key in keys]
        until(lambda: source.index.pinned_blocks == 0)


def two_requests_for_one_prefix() -> None:
    with nodes() as (source, consumer):
        keys = keys_of(0, 6)
        source.store(keys)
        first, second = (consumer.request(source.pull_params(), keys) for _ in range(2))
        until(lambda: [(consumer.look(one, keys), consumer.step())[0] for one in (first, second)] == [6, 6])
        for context in (first, second):
            consumer.finish(context)
        until(lambda: (consumer.step(), source.index.leases == 0)[1])


def what_is_refused_at_start() -> None:
    for settings, error in (
        ({"groups": 2}, UnsupportedCache),
        ({"insecure": False}, TierConfigError),
        ({"prot": 5}, TierConfigError),
        ({"peer_key_file": "/none", "insecure": False}, TierConfigError),
    ):
        try:
            PullOffloadingSpec(make_config("bad", 4, **settings)).get_manager()
        except error:
            continue
        else:
            raise AssertionError(f"{settings} was accepted")


def no_file_has_a_name() -> None:
    with nodes():
        assert not list(Path("/dev/shm").glob("vllm_offload_kvpull-test-*"))
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(entry))
        assert any("vllm_offload_kvpull-test" in link and "(deleted)" in link for link in links)


CASES: tuple[Callable[[], None], ...] = (
    a_pull_brings_the_source_s_bytes,
    a_request_without_a_source_finds_nothing,
    stored_events_name_parents_first,
    what_a_peer_is_reading_is_not_evicted,
    what_a_peer_has_read_counts_as_used,
    slots_that_a_peer_may_still_write_into_are_set_aside,
    a_reset_waits_for_what_may_still_be_written,
    a_reset_of_the_source_voids_leases,
    a_full_tier_gives_the_offer_back,
    an_eviction_makes_room_for_a_pull,
    a_request_that_goes_leaves_nothing_pinned,
    a_thousand_requests_that_go_while_their_source_is_mute,
    a_prefill_leg_that_computes_nothing_hands_over_all_the_same,
    a_prefill_leg_s_blocks_wait_pinned_for_the_decode_leg,
    two_requests_for_one_prefix,
    *orders.CASES,
    what_is_refused_at_start,
    no_file_has_a_name,
)


def main(wanted: list[str]) -> int:
    failed = 0
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        try:
            case()
        except Exception:  # noqa: BLE001 - a runner: every case is to be heard of
            failed += 1
            print(f"FAILED {case.__name__}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok {case.__name__}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
