"""One engine's offloading without the engine: vLLM's real managers, our spec, tier, policy and copies.

What vLLM's scheduler and worker do with them is done here by hand, one call at a time. Runs in vLLM's own
environment (`python -m tests.engine.inside.adapter`), with the classes of whichever vLLM is on the path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from engine_plugin.register import register
from engine_plugin.vllm.spec import PullOffloadingSpec

PAGE: Final = 2048  # bytes of a block in one of the two cache tensors
BLOCK: Final = 2 * PAGE
TOKENS: Final = 16
WAIT_S: Final = 120.0
PATIENT: Final = {"max_extra_ttft_s": 60.0}

register()
init_none_hash(sha256)


def key_of(number: int, group: int = 0) -> bytes:
    """The offload key of a block."""
    return make_offload_key(hashlib.sha256(b"%d" % number).digest(), group)


def keys_of(first: int, count: int) -> list[bytes]:
    return [key_of(first + place) for place in range(count)]


def content_of(key: bytes) -> bytes:
    """What a block holds: a function of its key, so that a block in the wrong place is seen."""
    return (hashlib.sha256(b"content" + key).digest() * (BLOCK // 32))[:BLOCK]


def make_config(name: str, blocks: int, *, groups: int = 1, **settings: Any) -> OffloadingConfig:
    tier = {"type": "kvpull", "host": "127.0.0.1", "port": 0, "insecure": True, "model": "m"} | settings
    parallel = {
        field.name: 0 if field.name in ("rank", "data_parallel_index") else 1
        for field in dataclasses.fields(OffloadingParallelConfig)
    } | {"data_parallel_rank_local": None, "is_parallelism_agnostic": False}
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(TOKENS, (f"layer-{at}",), at) for at in range(groups)),
        worker_kv_bytes_per_block=BLOCK,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": blocks * BLOCK, "secondary_tiers": [tier]},
        engine_id=f"kvpull-test-{name}-{time.monotonic_ns()}",
        model=OffloadingModelConfig(name="m", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(**parallel),
        kv_cache_layout="LBHNC",
    )


class Node:
    """One engine."""

    def __init__(self, name: str, blocks: int = 64, **settings: Any) -> None:
        config = make_config(name, blocks, **settings)
        self.blocks = blocks
        self.device = [torch.zeros((blocks * 2, PAGE), dtype=torch.int8) for _ in range(2)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, PAGE) for tensor in self.device],
            [[CanonicalKVCacheRef(0, PAGE), CanonicalKVCacheRef(1, PAGE)]],
        )
        self.worker = PullOffloadingSpec(config).get_worker(caches)
        self.manager = PullOffloadingSpec(config).get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self._requests = 0
        self._jobs = 0
        service = self.tier._service
        until(lambda: service.up.is_set() or service.failed.is_set())
        assert service.up.is_set()

    @property
    def port(self) -> int:
        return int(self.tier._service.address[1])

    @property
    def free_blocks(self) -> int:
        """Slots that hold nothing and are not set aside."""
        return int(self.manager.primary_tier._get_num_free_chunks())

    @property
    def index(self) -> Any:
        return self.tier._index

    def pull_params(self, kv_request_id: str = "id") -> dict[str, Any]:
        """How another node names this one as its source."""
        return {
            "remote_kv_source": {
                "kv_request_id": kv_request_id,
                "remote_host": "127.0.0.1",
                "remote_port": self.port,
            }
        }

    def request(self, params: dict[str, Any] | None = None, keys: Sequence[bytes] = ()) -> ReqContext:
        """A new request; `keys` are its prompt's, in order."""
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}", kv_transfer_params=params)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, (place + 1) * TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self, new: Sequence[str] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(list(new), []))

    def look(self, context: ReqContext, keys: Sequence[bytes]) -> int | None:
        """As vLLM's scheduler looks for a prompt's prefix: blocks that hit, or None for "later"."""
        hits, later = 0, False
        for key in keys:
            result = self.manager.lookup(key, context)
            if result is LookupResult.MISS:
                break
            hits += result in (LookupResult.HIT, LookupResult.HIT_PENDING)
            later |= result is not LookupResult.HIT
        return None if later else hits

    def found(self, context: ReqContext, keys: Sequence[bytes]) -> int:
        """Look, step by step, until there is an answer."""
        answers: list[int] = []

        def answered() -> bool:
            hits = self.look(context, keys)
            self.step()
            if hits is not None:
                answers.append(hits)
            return hits is not None

        until(answered)
        self.step([context.req_id])
        return answers[-1]

    def store(self, keys: Sequence[bytes], context: ReqContext | None = None) -> int:
        """A request computes these blocks: through the device and the worker into the CPU tier, in no
        particular order. Returns how many were stored."""
        request = self.request(None, keys) if context is None else context
        prepared = self.manager.prepare_store(list(keys), request)
        stored = [] if prepared is None else list(prepared.keys_to_store)
        if stored:
            for row, key in enumerate(stored):
                raw = torch.frombuffer(bytearray(content_of(key)), dtype=torch.int8)
                self.device[0][row], self.device[1][row] = raw[:PAGE], raw[PAGE:]
            rows = GPULoadStoreSpec(list(range(len(stored))), [len(stored)], [0])
            self._jobs += 1
            assert self.worker.submit_store(self._jobs, rows, prepared.store_spec)
            assert [one.transfer_size for one in self.worker.get_finished()] == [len(stored) * BLOCK]
            self.manager.complete_store(set(stored), request)
        if context is None:
            self.manager.on_request_finished(request)
        self.step()
        return len(stored)

    def load(self, context: ReqContext, keys: Sequence[bytes]) -> list[bytes]:
        """Blocks from the CPU tier back to the device, through the worker: what is there then."""
        spec = self.manager.prepare_load(list(keys), context)
        first = self.blocks
        rows = GPULoadStoreSpec(list(range(first, first + len(keys))), [len(keys)], [0])
        self._jobs += 1
        assert self.worker.submit_load(self._jobs, spec, rows)
        self.worker.get_finished()
        self.manager.complete_load(list(keys), context)
        return [
            b"".join(tensor[first + at].numpy().tobytes() for tensor in self.device)
            for at in range(len(keys))
        ]

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)
        self.step()

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.shutdown()


@contextlib.contextmanager
def nodes(source: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None) -> Iterator[Any]:
    """Two engines of one pool."""
    with contextlib.ExitStack() as stack:
        pair = []
        for name, settings in (("source", source), ("consumer", consumer)):
            node = Node(name, **(PATIENT | (settings or {})))
            stack.callback(node.close)
            pair.append(node)
        yield pair


def until(holds: Callable[[], bool]) -> None:
    """Raises `TimeoutError` when `holds` does not come true."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {WAIT_S:.0f} s")
        time.sleep(0.002)
