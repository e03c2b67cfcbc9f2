"""Copies between vLLM's KV cache and its CPU tier where both are host memory (the CPU platform).

vLLM's own offloading worker needs a GPU's streams. Here a copy is a copy: done when it is asked for, and
reported with the next step. Runs in the worker process.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

Rows = NDArray[np.int8]


class HostMemoryWorker(OffloadingWorker):
    """One worker's copies; owns its mapping of the CPU tier."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        """`kv_caches`: vLLM's canonical view, one (blocks, page bytes) tensor for each cache tensor.

        Raises:
            ValueError: a cache tensor is not in host memory.
        """
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._device: list[Rows] = []
        self._tier: list[Rows] = []  # (chunks, blocks of a chunk, page bytes) each
        self._results: list[TransferResult] = []
        for cache in kv_caches.tensors:
            if cache.tensor.device.type != "cpu":
                raise ValueError(f"a cache tensor is on {cache.tensor.device}, not in host memory")
            page = int(cache.page_size_bytes)
            self._device.append(_rows(cache.tensor, page))
            view = region.create_next_worker_view(page * blocks_per_chunk)
            chunks = torch.as_strided(
                view,
                (view.shape[0], blocks_per_chunk, page),
                (view.stride(0), page, 1),
                view.storage_offset(),
            )
            self._tier.append(chunks.numpy())

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_tier=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """vLLM 0.33 adds `expedited`: there is nothing to hurry."""
        return self._copy(job_id, dst_spec, src_spec, to_tier=False)

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Every submitted copy is done already."""

    def shutdown(self) -> None:
        self._device.clear()
        self._tier.clear()
        if self._region is not None:
            region, self._region = self._region, None
            region.cleanup()

    def _copy(self, job_id: int, device: Any, tier: Any, *, to_tier: bool) -> bool:
        started_s = time.perf_counter()
        copied_bytes, device_at, tier_at = 0, 0, 0
        for group, (blocks, first) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            if blocks == 0:
                continue
            # a group's first block can lie inside a chunk
            places = np.arange(blocks) + first % self._blocks_per_chunk
            chunks = -(-(blocks + first % self._blocks_per_chunk) // self._blocks_per_chunk)
            rows = device.block_ids[device_at : device_at + blocks]
            slots = tier.block_ids[tier_at : tier_at + chunks][places // self._blocks_per_chunk]
            parts = places % self._blocks_per_chunk
            for ref in self._refs[group]:
                size = int(ref.page_size_bytes)
                ours, theirs = self._device[ref.tensor_idx], self._tier[ref.tensor_idx]
                if to_tier:
                    theirs[slots, parts, :size] = ours[rows, :size]
                else:
                    ours[rows, :size] = theirs[slots, parts, :size]
                copied_bytes += blocks * size
            device_at += blocks
            tier_at += chunks
        seconds = time.perf_counter() - started_s
        self._results.append(TransferResult(job_id, True, copied_bytes, seconds))
        return True


def _rows(tensor: Any, page: int) -> Rows:
    """(blocks, page bytes) over the cache's own memory, whatever its strides."""
    rows: Rows = tensor.numpy()
    if rows.shape[1] != page or rows.strides[1] != 1:
        raise ValueError(f"a cache tensor of shape {rows.shape} is not (blocks, {page} bytes)")
    return rows
