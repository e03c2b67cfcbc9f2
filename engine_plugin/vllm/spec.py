"""vLLM's tiering offload with our tier attached: on GPUs as it is, on the CPU platform with our copies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from engine_plugin.vllm import compat
from engine_plugin.vllm.cpu_worker import HostMemoryWorker
from engine_plugin.vllm.engine_identity import check_cache
from engine_plugin.vllm.host_memory import check_room
from engine_plugin.vllm.tier import PullTier


class PullOffloadingSpec(TieringOffloadingSpec):
    """`spec_name` in `kv_connector_extra_config`; see docs/engine-plugin.md."""

    def __init__(self, config: Any) -> None:
        """Raises UnsupportedEngine, UnsupportedCache, TierMemoryError."""
        compat.check_engine()
        super().__init__(config)
        self._manager: Any = None
        self._worker: Any = None
        check_cache(self)
        check_room(self.num_chunks * self.kv_bytes_per_chunk)

    def get_manager(self) -> Any:
        if self._manager is None:
            manager = super().get_manager()
            manager.complete_store = _in_prefix_order(manager.complete_store)
            for tier in manager.secondary_tiers:
                if isinstance(tier, PullTier):
                    tier.attach(manager.primary_tier, compat.find_waker())
            _unlink(compat.region_of(self))
        return self._manager

    def get_worker(self, kv_caches: Any) -> Any:
        """Without vLLM's check for a GPU."""
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        if any(cache.tensor.device.type != "cpu" for cache in kv_caches.tensors):
            return super().create_worker(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            worker = HostMemoryWorker(kv_caches, self.blocks_per_chunk, region)
        except Exception:
            region.cleanup()
            raise
        compat.disown_region_file(region)  # `_unlink` in the scheduler's process sees to it
        return worker


def _in_prefix_order(complete_store: Callable[..., None]) -> Callable[..., None]:
    """vLLM names a step's blocks as a set; KV events should name parents before children."""

    def complete(keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        place = req_context.get_offload_key_position
        complete_store(sorted(keys, key=lambda key: place(key) or 0), req_context, success)

    return complete


def _unlink(region: Any) -> None:
    """Drop the tier's file name once all have mapped it, so that no kind of stop leaves it behind.

    The workers map it before the scheduler exists. If the scheduler made the file they have not: leave it.
    """
    if compat.was_region_creator(region):
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(region.mmap_path)
