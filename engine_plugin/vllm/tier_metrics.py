"""The tier's figures in vLLM's own metrics pipe: they appear on the engine's /metrics as `kvpull_*`.

vLLM sends them along with its step statistics; the service asks an idle engine for a step when they change.
Values are read from counters that others keep; nothing here counts but what the tier itself ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from engine_plugin import wire
from engine_plugin.transport.stats import DURATION_BOUNDS_S, TransportStats
from engine_plugin.vllm.pull_service import PullService
from engine_plugin.vllm.tier_config import TierConfig
from engine_plugin.vllm.tier_index import TierIndex

_Labels = tuple[str, ...]
QUARANTINED: Final = "kvpull_quarantined_slots"
UP: Final = "kvpull_up"
PULLED_TOKENS: Final = "kvpull_pulled_tokens"
IGNORED: Final = "kvpull_sources_ignored"
BLOCKS: Final = "kvpull_blocks"
CHUNKS: Final = "kvpull_chunks"
ORDERS: Final = "kvpull_prefetch_orders"

_COUNTERS: Final = {
    wire.PULL_RECEIVED_BYTES_TOTAL: ("Bytes pulled from a peer and verified.", ("peer",)),
    wire.PULL_SERVED_BYTES_TOTAL: ("Bytes written to a peer.", ("peer",)),
    wire.PEER_REFUSED_TOTAL: ("Peers that refused us or that we refused.", ("peer", "reason")),
    wire.PULLS_TOTAL: ("Pulls that a request named a source for, by what came of them.", ("reason",)),
    PULLED_TOKENS + "_total": ("Prompt tokens whose blocks came from a peer.", ()),
    IGNORED + "_total": ("Named sources that were not even considered.", ("reason",)),
    BLOCKS + "_total": ("Blocks of pulls.", ("step",)),
    CHUNKS + "_total": ("Transfers, as they complete.", ("direction",)),
    wire.HANDSHAKES_UNFINISHED_TOTAL: (
        "Callers that left, or fell silent, before they proved themselves.",
        (),
    ),
    ORDERS + "_total": ("Orders to pull without a request, by what came of them.", ("reason",)),
}
_HISTOGRAMS: Final = {
    wire.SESSION_SETUP_SECONDS: "From the dial of a peer to its acceptance.",
    wire.TRANSFER_SECONDS: "Of a pull whose blocks are usable, to the last verified one.",
}
_GAUGES: Final = {
    wire.ENGINE_INFO: ("What peers compare, and where this engine can be reached.", wire.ENGINE_INFO_LABELS),
    wire.LEASES: ("Leases that peers hold now.", ()),
    QUARANTINED: ("CPU-tier slots that a peer may still write into.", ()),
    wire.CPU_TIER_FILL: ("Share of the CPU tier that holds readable blocks, 0..1.", ()),
    wire.PEER_KEYS: ("Keys of the pool: 2 shown to peers, 1 accepted, 0 no longer.", ("key",)),
    UP: ("1 when this engine can pull and serve.", ()),
}


def metric_definitions() -> dict[str, Any]:
    """What vLLM's front end has to know in advance. Its counters are named without `_total`."""
    counters = {
        name.removesuffix("_total"): OffloadingCounterMetadata(documentation=text, labelnames=labels)
        for name, (text, labels) in _COUNTERS.items()
    }
    gauges = {
        name: OffloadingGaugeMetadata(documentation=text, labelnames=labels)
        for name, (text, labels) in _GAUGES.items()
    }
    histograms = {
        name: OffloadingHistogramMetadata(documentation=text, buckets=DURATION_BOUNDS_S)
        for name, text in _HISTOGRAMS.items()
    }
    return counters | gauges | histograms


class TierMetrics:
    """Turns totals into the increments that vLLM wants. On the scheduler thread."""

    def __init__(self, config: TierConfig, service: PullService, index: TierIndex, slots: int) -> None:
        self._config = config
        self.ignored: Counter[str] = Counter()
        self._service = service
        self._index = index
        self._slots = max(1, slots)
        self._sent: dict[str, dict[_Labels, float]] = {}
        self._key_ids: dict[str, None] = {}  # seen so far

    def take(self, aside_blocks: int) -> OffloadingConnectorStats:
        """What has changed since the last call."""
        told = OffloadingConnectorStats()
        told.set_gauge(UP, float(self._service.up.is_set()))
        told.set_gauge(wire.LEASES, self._index.leases)
        told.set_gauge(QUARANTINED, max(aside_blocks, self._service.quarantined_slots))
        told.set_gauge(wire.CPU_TIER_FILL, len(self._index) / self._slots)
        self._info(told)
        for key, state in self._keys().items():
            told.set_gauge(wire.PEER_KEYS, state, (key,))
        self._add(told, IGNORED, {(reason,): n for reason, n in self.ignored.items()})
        counts, stats = self._service.counts, self._service.stats
        self._add(told, wire.PULLS_TOTAL, {(reason,): n for reason, n in dict(counts.reports).items()})
        self._add(told, PULLED_TOKENS, {(): counts.received_tokens})
        self._add(told, ORDERS, _by_one(dict(counts.orders)))
        if stats is not None:
            self._transport(told, stats)
        return told

    def _transport(self, told: OffloadingConnectorStats, stats: TransportStats) -> None:
        for name, durations in (
            (wire.SESSION_SETUP_SECONDS, stats.session_setup_s),
            (wire.TRANSFER_SECONDS, stats.transfer_s),
        ):
            for seconds in durations.take():
                told.observe_histogram(name, seconds)
        self._add(told, wire.HANDSHAKES_UNFINISHED_TOTAL, {(): stats.handshakes_unfinished})
        self._add(told, wire.PULL_RECEIVED_BYTES_TOTAL, _by_one(dict(stats.received_bytes)))
        self._add(told, wire.PULL_SERVED_BYTES_TOTAL, _by_one(dict(stats.served_bytes)))
        self._add(
            told,
            wire.PEER_REFUSED_TOTAL,
            {(peer, why): n for (peer, why), n in dict(stats.refused).items()},
        )
        steps = {
            "asked": stats.asked_blocks,
            "offered": stats.offered_blocks,
            "received": stats.received_blocks,
            "served": stats.served_blocks,
        }
        self._add(told, BLOCKS, _by_one(steps))
        chunks = {"in": stats.chunks_reported, "out": stats.chunks_written}
        self._add(told, CHUNKS, _by_one(chunks))

    def _info(self, told: OffloadingConnectorStats) -> None:
        identity = self._service.identity
        if identity is None or not self._service.up.is_set():
            return
        labels = identity.info_labels(
            p2p_addr=self._service.address,
            events_port=_of_rank(self._config.events_port, identity.rank),
            replay_port=_of_rank(self._config.replay_port, identity.rank),
            reports_port=self._service.reports_port,
        )
        told.set_gauge(wire.ENGINE_INFO, 1, tuple(labels[name] for name in wire.ENGINE_INFO_LABELS))

    def _keys(self) -> dict[str, int]:
        ids = self._service.key_ids
        self._key_ids |= dict.fromkeys(ids)
        return {key: wire.key_state(key, ids) for key in self._key_ids}

    def _add(self, told: OffloadingConnectorStats, name: str, totals: Mapping[_Labels, float]) -> None:
        name = name.removesuffix("_total")
        sent = self._sent.setdefault(name, {})
        for labels, total in totals.items():
            new = total - sent.get(labels, 0)
            if new > 0:
                told.increase_counter(name, new, labels)
                sent[labels] = total


def _of_rank(port: int, rank: int) -> int:
    return port + rank if port else 0


def _by_one(totals: Mapping[str, float]) -> dict[_Labels, float]:
    return {(label,): total for label, total in totals.items()}
