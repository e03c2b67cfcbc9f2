"""Reads the pages of pickers, engines and sidecars into facts. Pure: texts in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine_plugin import wire
from epp.ops.doctor.facts import Listed

EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
SIDECAR_PULLS = "kvpull_sidecar_pulls_requested_total"
SIDECAR_DROPS = "kvpull_sidecar_routing_headers_dropped_total"
SIDECAR_SKIPS = "kvpull_sidecar_pulls_skipped_total"
DECISIONS = "kvpull_epp_source_decisions_total"
MESSAGES = "kvpull_epp_kv_event_messages_total"


class Page:
    """Samples of one Prometheus page by name. A broken page counts as far as it goes."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = {}
        self.whole = True
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples.setdefault(sample.name, []).append(sample)
        except (ValueError, KeyError, IndexError):
            self.whole = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._samples)

    def samples(self, name: str) -> Iterable[Sample]:
        return self._samples.get(name, ())

    def total(self, name: str) -> float | None:
        """Sum over all labels; None where there is no such metric."""
        found = self._samples.get(name)
        return None if found is None else sum(sample.value for sample in found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label."""
        sums: dict[str, float] = {}
        for sample in self.samples(name):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return sums


def info_of(page: Page, rank: str) -> dict[str, str] | None:
    """Labels of the engine's info for `rank`; None: it publishes none."""
    rows = [dict(sample.labels) for sample in page.samples(wire.ENGINE_INFO)]
    return next((row for row in rows if row.get("rank") == rank), rows[0] if rows else None)


def drops_of(page: Page) -> dict[str, float]:
    """Reasons for which routing headers, or the source in one, were not followed."""
    sums = page.by(SIDECAR_DROPS, "reason")
    for reason, count in page.by(SIDECAR_SKIPS, "reason").items():
        sums[reason] = sums.get(reason, 0.0) + count
    return sums


def rise(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What has been added, by key, where anything has."""
    return {key: value - before.get(key, 0.0) for key, value in after.items() if value > before.get(key, 0.0)}


def messages_of(page: Page) -> dict[str, dict[str, float]]:
    """Event messages by endpoint and kind."""
    found: dict[str, dict[str, float]] = {}
    for sample in page.samples(MESSAGES):
        found.setdefault(sample.labels.get("endpoint", ""), {})[sample.labels.get("outcome", "")] = (
            sample.value
        )
    return found


def listed(rows: Any) -> Iterator[Listed]:
    """A picker's endpoints. Raises KeyError, TypeError, ValueError or AttributeError where they are none."""
    for row in rows:
        address = str(row["address"])
        info = row["info"]
        yield Listed(
            name=f"{row['pod']}/{int(row['rank'])}",
            address=address,
            host=address.rpartition(":")[0].strip("[]"),
            state=str(row["state"]),
            p2p_address=str(row.get("p2p_address") or ""),
            events_port=row.get("events_port"),
            replay_port=row.get("replay_port"),
            waiting_known=row["waiting"] is not None,
            metrics_age_s=row["metrics_age_s"],
            block_size_tokens=row["block_size_tokens"] or (info or {}).get("block_size"),
            cpu_blocks=int(row["blocks_cpu"]),
            info=None if info is None else {key: str(value) for key, value in info.items()},
            differs_from_pool=bool(row["differs_from_pool"]),
            hashes_unlike=row["hashes_unlike"],
            events=dict(row["events"]),
            refused_peers=tuple(row["refused_peers"]),
            draining=bool(row["draining"]),
        )
