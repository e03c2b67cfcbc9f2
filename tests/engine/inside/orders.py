"""Orders to pull ahead of need, on vLLM's real classes: cases of `adapter`."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

from engine_plugin.transport import PrefetchOrder, PrefetchResult, PullError
from tests.engine.inside.node import BLOCK, Node, content_of, keys_of, nodes, until


@contextlib.contextmanager
def keyed_nodes(source: dict[str, Any] | None = None, target: dict[str, Any] | None = None) -> Iterator[Any]:
    """Two engines that have a pool key: orders are taken from those who hold it."""
    with tempfile.NamedTemporaryFile() as key:
        key.write(b"a-pool-key-of-thirty-two-bytes-!")
        key.flush()
        keyed = {"insecure": False, "peer_key_file": key.name}
        with nodes(keyed | (source or {}), keyed | (target or {})) as pair:
            yield pair


def ordered(source: Node, target: Node, keys: list[bytes]) -> PrefetchResult:
    """The source orders `target` to pull from it. The target makes only those steps that it asks for, as an
    idle engine does."""
    order = PrefetchOrder(("127.0.0.1", source.port), "order", tuple(keys), 60.0)
    service = source.tier._service
    asked = asyncio.run_coroutine_threadsafe(
        service._transport.prefetch(("127.0.0.1", target.port), order), service._loop
    )

    def answered() -> bool:
        if target.tier.has_pending_work():
            target.step()
        return asked.done()

    until(answered)
    return asked.result()


def an_order_brings_blocks_and_no_request_waits_for_them() -> None:
    with keyed_nodes() as (source, target):
        keys = keys_of(0, 12)
        source.store(keys)
        target.store(keys[:4])
        assert ordered(source, target, [*keys, *keys_of(500, 3)]) == PrefetchResult(12, 8 * BLOCK)
        assert target.tier._service.counts.orders == {"ok": 1}
        until(lambda: source.index.leases == 0)
        context = target.request(None, keys)
        assert target.found(context, keys) == 12
        assert target.load(context, keys) == [content_of(key) for key in keys]
        asked_blocks = target.tier._service.stats.asked_blocks
        assert ordered(source, target, keys) == PrefetchResult(12, 0)
        assert target.tier._service.stats.asked_blocks == asked_blocks
        assert target.manager.primary_tier._num_write_pending_chunks == 0


def an_order_that_finds_no_room_gives_its_offer_back() -> None:
    with keyed_nodes(None, {"blocks": 8}) as (source, target):
        keys, others = keys_of(0, 6), keys_of(100, 8)
        source.store(keys)
        target.store(others)
        target.manager.prepare_load(others, target.request(None, others))  # all of it is being read
        assert ordered(source, target, keys) == PrefetchResult(0, 0, "no_slots")
        until(lambda: source.index.leases == 0)


def an_order_s_slots_are_set_aside_too() -> None:
    with keyed_nodes({"faults": ["corrupt_block=4"]}, {"blocks": 16}) as (source, target):
        keys = keys_of(0, 10)
        source.store(keys)
        assert ordered(source, target, keys) == PrefetchResult(4, 4 * BLOCK, "checksum")
        assert target.index.held_prefix(keys) == 4
        assert target.free_blocks == 12
    frozen = {"faults": ["hold_after_chunks=0"]}
    with keyed_nodes(frozen, {"blocks": 16, "max_extra_ttft_s": 1.0}) as (source, target):
        source.store(keys)
        assert ordered(source, target, keys).reason == "timeout"
        until(lambda: (target.step(), target.tier._policy.aside_blocks == 0)[1])
        assert target.free_blocks == 16
        assert target.manager.primary_tier._num_write_pending_chunks == 0


def without_a_key_no_orders_are_taken() -> None:
    with nodes() as (source, target):
        refused = ""
        try:
            ordered(source, target, keys_of(0, 2))
        except PullError as error:
            refused = error.detail
        assert "takes no prefetch orders" in refused


CASES = (
    an_order_brings_blocks_and_no_request_waits_for_them,
    an_order_that_finds_no_room_gives_its_offer_back,
    an_order_s_slots_are_set_aside_too,
    without_a_key_no_orders_are_taken,
)
