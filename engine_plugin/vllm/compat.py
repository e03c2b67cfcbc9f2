"""What of vLLM this adapter stands on, and for which versions that was tried.

vLLM calls its offloading interfaces experimental, so a version that was not tried is refused with a sentence
instead of failing somewhere inside a request. Nothing else in the adapter knows versions.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

SUPPORTED: Final = ("0.32", "0.33")
_OFFLOAD: Final = "vllm.v1.kv_offload."


class UnsupportedEngine(RuntimeError):
    """This vLLM is not one that the plugin was made for; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A class of vLLM and what the adapter calls on it, overrides in it, or reads from it.

    `parameters`: names that the constructor or the named method takes by keyword.
    """

    path: str
    names: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


REQUIREMENTS: Final = (
    Requirement(
        _OFFLOAD + "tiering.base.SecondaryTierManager",
        (
            "lookup",
            "submit_store",
            "submit_load",
            "get_finished_jobs",
            "has_pending_work",
            "on_new_request",
            "on_request_finished",
            "on_schedule_end",
            "drain_jobs",
            "shutdown",
            "build_metric_definitions",
            "get_stats",
        ),
        ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    ),
    Requirement(
        _OFFLOAD + "tiering.base.JobResult",
        (),
        ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    ),
    Requirement(_OFFLOAD + "tiering.spec.TieringOffloadingSpec", ("get_manager", "create_worker")),
    Requirement(_OFFLOAD + "tiering.factory.SecondaryTierFactory", ("register_tier",)),
    Requirement(_OFFLOAD + "factory.OffloadingSpecFactory", ("register_spec",)),
    Requirement(_OFFLOAD + "cpu.manager.CPUOffloadingManager", ("complete_store",)),
    Requirement(
        _OFFLOAD + "cpu.policies.base.CachePolicy",
        (
            "get",
            "insert",
            "remove",
            "touch",
            "evict",
            "clear",
            "mark_evictable",
            "mark_non_evictable",
            "on_store_miss",
            "on_request_finished",
        ),
    ),
    Requirement(_OFFLOAD + "cpu.shared_offload_region.SharedOffloadRegion", ("create_next_worker_view",)),
    Requirement(
        _OFFLOAD + "base.OffloadingWorker",
        ("submit_store", "submit_load", "get_finished", "wait", "shutdown"),
    ),
    Requirement(_OFFLOAD + "base.ReqContext", ("set_state", "get_state", "get_offload_key_position")),
)


def installed_version() -> str:
    """vLLM's own idea of its version."""
    return str(importlib.import_module("vllm.version").__version__)


def check_engine(version: str | None = None) -> None:
    """Raises UnsupportedEngine for a vLLM that this adapter was not made for, or that lacks something.

    `KVPULL_ALLOW_VLLM=<version>` accepts one more version by name; what it lacks is still refused.
    """
    version = installed_version() if version is None else version
    accepted = (*SUPPORTED, os.environ.get("KVPULL_ALLOW_VLLM", SUPPORTED[0]))
    if not any(version == one or version.startswith(one + ".") for one in accepted):
        raise UnsupportedEngine(
            f"kvpull supports vLLM {' and '.join(SUPPORTED)}, not {version}: its offloading interfaces "
            f"change between versions. Set KVPULL_ALLOW_VLLM={version} to try it all the same."
        )
    missing = list(missing_parts())
    if missing:
        raise UnsupportedEngine(f"kvpull cannot run in this vLLM {version}: it has no {', '.join(missing)}")


def missing_parts() -> Iterator[str]:
    """What the installed vLLM lacks of `REQUIREMENTS`, as dotted names."""
    for requirement in REQUIREMENTS:
        module, _, name = requirement.path.rpartition(".")
        found = getattr(importlib.import_module(module), name, None)
        if found is None:
            yield requirement.path
            continue
        yield from (f"{name}.{part}" for part in requirement.names if not hasattr(found, part))
        taken = inspect.signature(found).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
            yield from (f"{name}({part}=)" for part in requirement.parameters if part not in taken)


# --- seams: private names of vLLM, each used in one place -------------------------------------------


def region_of(spec: Any) -> Any:
    """The scheduler's mapping of the CPU tier, made before the secondary tiers are."""
    return spec._scheduler_mmap


def policy_of(primary: Any) -> Any:
    """The CPU tier's cache policy."""
    return primary._policy


def replace_policy(primary: Any, policy: Any) -> None:
    """Give the CPU tier another policy; before its first use."""
    primary._policy = policy


def insert_chunk(policy: Any, key: bytes, chunk: Any, req_context: Any) -> None:
    """Put a chunk into a cache policy; vLLM 0.33 wants to know for which request."""
    if "req_context" in inspect.signature(policy.insert).parameters:
        policy.insert(key, chunk, req_context)
    else:
        policy.insert(key, chunk)


def disown_region_file(region: Any) -> None:
    """A region whose file has been unlinked must not try again when it is closed."""
    region._creator = False


def was_region_creator(region: Any) -> bool:
    """Whether this process made the region's file (else somebody else has mapped it before)."""
    return bool(region._creator)


def find_waker() -> Callable[[], None] | None:
    """How to make an idle engine take one step; None where nobody waits (no engine, or one of a
    data-parallel group, whose ranks step together).

    vLLM gives a tier no way to ask for it. The engine that is making us is up the stack; its input queue
    takes a request that means nothing but "look again".
    """
    frame = inspect.currentframe()
    while frame is not None:
        engine = frame.f_locals.get("self")
        queue = getattr(engine, "input_queue", None)
        if type(engine).__name__ == "EngineCoreProc" and queue is not None:
            wakeup = importlib.import_module("vllm.v1.engine").EngineCoreRequestType.WAKEUP
            return lambda: queue.put_nowait((wakeup, None))
        frame = frame.f_back
    return None


def replace_publisher(make: Callable[[type[Any]], type[Any]]) -> None:
    """Publish KV events by another class than vLLM's own; once a process.

    vLLM's configuration allows no third name, so ours takes the place of the stock one.
    """
    events = importlib.import_module("vllm.distributed.kv_events")
    registry = events.EventPublisherFactory._registry
    if registry["zmq"] is events.ZmqEventPublisher:
        registry["zmq"] = make(events.ZmqEventPublisher)


def hash_facts() -> tuple[str, str] | None:
    """(algorithm, seed) of the block hashes; None before the engine has chosen them.

    The algorithm is found by recomputing the first hash of every chain from the seed: it is what the engine
    does and not what some configuration says. `unknown`: none of the known ones gives it.
    """
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    root = getattr(utils, "NONE_HASH", None)
    if root is None:
        return None
    seed = str(utils.get_none_hash_seed())
    hashing = importlib.import_module("vllm.utils.hashing")
    for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        try:
            if hashing.get_hash_fn_by_name(name)(seed) == root:
                return name, seed
        except (ImportError, ModuleNotFoundError, ValueError):
            continue
    return "unknown", seed
