"""The composition root: one engine from its settings. Nothing is started here."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass

from deploy.local.engine.config import EngineConfig
from deploy.local.engine.content import Content
from deploy.local.engine.core import Engine, Parts
from deploy.local.engine.counters import EngineCounters
from deploy.local.engine.events import EventLog, EventPublisher
from deploy.local.engine.hashing import BlockHasher
from deploy.local.engine.memory import KvMemory
from deploy.local.engine.prefetching import BlockPrefetcher
from deploy.local.engine.prompts import PromptReader
from deploy.local.engine.pulls import Puller, PullLimits
from deploy.local.engine.scheduler import Scheduler
from deploy.local.engine.stepper import Stepper
from deploy.local.engine.store import CpuStore
from deploy.local.engine.vocabulary import answer_tokens
from engine_plugin.identity import fingerprint
from engine_plugin.report_publisher import ReportPublisher
from engine_plugin.transport import Faults, Limits, PeerIdentity, PeerTransport, TierMemory
from epp.engine_model.cache import PagedCache
from epp.request.local_tokenizer import LocalTokenizer

REVISION = "emulated-1"  # of the function from tokens to bytes
LAYOUT = "token-major"
DTYPE = "uint64"


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything one engine process owns."""

    config: EngineConfig
    identity: PeerIdentity
    tier: TierMemory
    transport: PeerTransport
    faults: Faults | None
    publisher: EventPublisher
    reports: ReportPublisher
    parts: Parts
    reader: PromptReader

    def engine(self) -> Engine:
        """The loop; the transport must have started (its real address is named to peers)."""
        return Engine(self.parts, p2p_address=self.transport.address)


def peer_identity(config: EngineConfig, instance: str) -> PeerIdentity:
    """What peers compare. The hash seed appears as a fingerprint only."""
    return PeerIdentity(
        instance=instance,
        rank=config.rank,
        model=config.model,
        revision=REVISION,
        block_size_tokens=config.block_size,
        block_bytes=config.block_bytes,
        dtype=DTYPE,
        layout=LAYOUT,
        tp_size=1,
        hash_algo=config.hash_algo,
        seed_fp=fingerprint(config.hash_seed),
    )


def assemble(config: EngineConfig) -> Assembly:
    """Blocking: loads the tokenizer, reserves the CPU tier. Needs a running loop.

    Raises:
        ConfigError, VocabularyError: the tokenizer directory cannot be used.
        TierMemoryError: /dev/shm has not enough room.
    """
    tokenizer = LocalTokenizer.load(config.tokenizer)
    vocabulary = answer_tokens(tokenizer)
    tier = TierMemory.create(config.cpu_blocks, config.block_bytes)
    identity = peer_identity(config, uuid.uuid4().hex)
    wake = asyncio.Event()
    cache = PagedCache(config.device_blocks, config.cpu_blocks)
    hasher = BlockHasher(
        block_size=config.block_size,
        seed=config.hash_seed,
        algorithm=config.hash_algo,
        salt_key=config.salt_key,
    )
    events = EventLog(block_size=config.block_size, stock_cpu_events=config.stock_cpu_events)
    counters = EngineCounters()
    store = CpuStore(cache.cpu, supply_keep_s=config.supply_keep_s, on_change=wake.set)
    faults = Faults() if config.enable_faults else None
    publisher = EventPublisher(topic=f"kv@{config.name}@{config.served_name}", rank=config.rank)
    reports = ReportPublisher()
    prefetcher = BlockPrefetcher(pool=cache.cpu, events=events, hasher=hasher, on_change=wake.set)
    transport = PeerTransport(
        listen=(config.host, config.p2p_port),
        identity=identity,
        tier=tier,
        store=store,
        keys=config.peer_keys,
        insecure=config.insecure,
        limits=Limits(),
        faults=faults,
        prefetcher=prefetcher,
    )
    prefetcher.transport = transport
    parts = Parts(
        timing=config.timing,
        time_scale=config.time_scale,
        cache=cache,
        memory=_memory(config, tier),
        hasher=hasher,
        events=events,
        publisher=publisher,
        store=store,
        puller=_puller(config, transport, cache, events, wake, reports),
        scheduler=Scheduler(
            timing=config.timing, max_running=config.max_num_seqs, max_waiting=config.max_num_queued
        ),
        stepper=Stepper(
            cache=cache,
            hasher=hasher,
            events=events,
            counters=counters,
            vocabulary=vocabulary,
            clock=asyncio.get_running_loop().time,
        ),
        counters=counters,
        instance=identity.instance,
        wake=wake,
    )
    reader = PromptReader(tokenizer, max_model_len=config.max_model_len)
    return Assembly(config, identity, tier, transport, faults, publisher, reports, parts, reader)


def _memory(config: EngineConfig, tier: TierMemory) -> KvMemory:
    content = Content(model=config.model, kv_bytes_per_token=config.kv_bytes_per_token)
    return KvMemory(
        device_slots=config.device_blocks, block_size=config.block_size, content=content, cpu=tier.array
    )


def _puller(
    config: EngineConfig,
    transport: PeerTransport,
    cache: PagedCache,
    events: EventLog,
    wake: asyncio.Event,
    reports: ReportPublisher,
) -> Puller:
    limits = PullLimits(config.pull_base_s, config.pull_max_s, config.supply_wait_s)
    return Puller(
        transport=transport,
        pool=cache.cpu,
        events=events,
        limits=limits,
        block_size=config.block_size,
        on_change=wake.set,
        on_finished=reports.publish,
    )
