"""vLLM's cache policy with peers in mind: tells the index, spares pinned blocks, sets slots aside.

Wraps whichever policy is configured; decides nothing about recency itself. On the scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from engine_plugin.vllm import compat
from engine_plugin.vllm.tier_index import EitherSet, TierIndex

_ASIDE = b"kvpull-quarantine-"  # no block hash begins so: theirs are digests


class GuardedPolicy(CachePolicy):
    """A policy around a policy."""

    def __init__(self, inner: CachePolicy, index: TierIndex) -> None:
        super().__init__(inner.cache_capacity)
        self._inner = inner
        self._index = index
        self._aside: dict[int, Any] = {}  # slot -> chunk
        # once a block and step for every waiting request: not worth a call through us
        self.get = inner.get  # type: ignore[method-assign]
        self.mark_non_evictable = inner.mark_non_evictable

    # --- what vLLM calls ------------------------------------------------------------------------
    def get(self, key: Any) -> Any:
        """Replaced by the inner policy's own in `__init__`."""
        return self._inner.get(key)

    def insert(self, key: Any, chunk: Any, *more: Any) -> None:
        """`more`: the request, from vLLM 0.33 on."""
        self._inner.insert(key, chunk, *more)

    def on_request_access(self, keys: Iterable[Any], req_context: Any) -> None:
        """New in vLLM 0.33; older policies have nothing to say to it."""
        heard = getattr(self._inner, "on_request_access", None)
        if heard is not None:
            heard(keys, req_context)

    def remove(self, key: Any) -> None:
        self._index.removed(key)
        self._inner.remove(key)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        self._inner.touch(keys, req_context)

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        self._inner.on_store_miss(keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        self._inner.on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, Any]] | None:
        """As the inner policy, but what peers are reading stays, and what they have read counts as used."""
        served = [key for key in self._index.take_served() if key in self._index]
        if served:
            self._inner.touch(served, ReqContext(req_id="kvpull-served"))
        with self._index.evicting() as (pinned, gone):
            spared: Any = EitherSet(protected, pinned) if pinned else protected
            evicted: list[tuple[Any, Any]] | None = self._inner.evict(n, spared)
            gone.extend(key for key, _ in evicted or ())
        return evicted

    def clear(self) -> None:
        self._index.cleared()
        self._aside.clear()
        self._inner.clear()

    def mark_evictable(self, key: Any) -> None:
        """A store or a read of `key` is over: from now on at the latest it can be read."""
        self._inner.mark_evictable(key)
        if key not in self._index:
            self._index.stored(key, int(self._inner.get(key).chunk_id))

    # --- what our tier calls --------------------------------------------------------------------
    def set_aside(self, keys: Iterable[Any], slots: set[int]) -> None:
        """Take blocks that never arrived out of the tier without freeing their slots: a peer may still
        write there. The requests that wanted them see a miss at once."""
        for key in keys:
            chunk = self._inner.get(key)
            if chunk is not None and not chunk.is_ready and int(chunk.chunk_id) in slots:
                self._inner.remove(key)
                self._aside[int(chunk.chunk_id)] = chunk

    def give_back(self, slots: Iterable[int], req_context: Any) -> list[bytes]:
        """No write can reach `slots` any more. Returns stand-in keys for the ones that were set aside;
        failing the store of those, in `req_context`, frees the slots in vLLM's own way."""
        stand_ins = []
        for slot in slots:
            chunk = self._aside.pop(slot, None)
            if chunk is not None:
                key = _ASIDE + slot.to_bytes(8, "big")
                compat.insert_chunk(self._inner, key, chunk, req_context)
                stand_ins.append(key)
        return stand_ins

    @property
    def aside_blocks(self) -> int:
        """Slots that nobody may use."""
        return len(self._aside)
