"""The few lines of an engine's `/metrics` page that routing needs, read fast and without trust.

A vLLM page has 75 KB and is read many times a second for every endpoint, so this looks for
its few names in the bytes and is no full exposition parser. Absent, NaN, infinite, negative or
malformed values are None: *unknown*, which is neither idle nor full. It never raises on any page, and
its work is bounded on any page: linear in what it looks at, which the limits below keep small.
Names: vLLM 0.32, SGLang, and our plugin's (`engine_plugin.wire`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_plugin import wire
from epp.core.types import EndpointMetrics, EngineInfo
from epp.endpoints.lora_labels import read_lora_state
from epp.plugins.metric_specs import NO_MORE_GAUGES, EngineGauges

MAX_REFUSED_SERIES: Final = 256
MAX_BLOCK_SIZE_TOKENS: Final = 1 << 20
MAX_SAMPLES: Final = 1024  # of one name
MAX_LABELS_BYTES: Final = 1 << 11  # of one sample
MAX_PAGE_LABELS_BYTES: Final = 1 << 18  # of all samples together
_MAX_VALUE_BYTES: Final = 256  # blanks, value, timestamp

_WAITING: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_RUNNING: Final = ("vllm:num_requests_running", "sglang:num_running_reqs")
_KV_USAGE: Final = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
# info metric and the label that holds the block size
_CACHE_CONFIG: Final = {"vllm:cache_config_info": "block_size", "sglang:cache_config_info": "page_size"}
_CACHE_BLOCKS: Final = ("num_gpu_blocks", "num_pages")  # labels that hold how many blocks there are
_LORA: Final = "vllm:lora_requests_info"
_SLEEP: Final = "vllm:engine_sleep_state"  # one sample a state; 1 for the one it is in
_SLEEP_LEVELS: Final = ("weights_offloaded", "discard_all")  # both discard the KV cache
_ENGINE_LABELS: Final = ("engine", "dp_rank")  # whose value is the data-parallel rank

_OWN_NAMES: Final = (_WAITING, _RUNNING, _KV_USAGE)
_NAMES: Final = (
    *_WAITING,
    *_RUNNING,
    *_KV_USAGE,
    *_CACHE_CONFIG,
    _LORA,
    _SLEEP,
    wire.ENGINE_INFO,
    wire.PEER_REFUSED_TOTAL,
)
_NEEDLES: Final = tuple((name, b"\n" + name.encode()) for name in _NAMES)
# the rest of a sample's line, after its name
_SAMPLE: Final = re.compile(rb"(?:\{(.*)\})?[ \t]+([^ \t\r\n]+)")
# one label and what separates it from the next; possessive, so a failure costs no second look
_LABEL: Final = re.compile(
    rb'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+(?:,[ \t]*+|\Z)'
)
_AFTER_NAME: Final = (b"{", b" ", b"\t")
_NUMBER: Final = re.compile(rb"\+?[0-9.]+(?:[eE][+-]?[0-9]+)?")
_ESCAPES: Final = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_ESCAPE: Final = re.compile(r'\\[n"\\]')


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """What one page said. `info_labels` are all labels of `kvpull_engine_info`, ports among them;
    `peer_refused` counts what this engine refused, by (peer, reason)."""

    metrics: EndpointMetrics
    info_labels: Mapping[str, str] = field(default_factory=dict)
    peer_refused: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sample:
    labels: bytes
    value: float | None  # None: not a finite, non-negative number

    def read_labels(self) -> dict[str, str]:
        """Empty where the block is malformed: none of it is believed then."""
        labels: dict[str, str] = {}
        at = 0
        while at < len(self.labels):
            match = _LABEL.match(self.labels, at)
            if match is None:
                return {}
            labels[match[1].decode()] = _unescape(match[2].decode("utf-8", "replace"))
            at = match.end()
        return labels


_UNREAD: Final = _Sample(b"", None)  # stands for samples over a limit: no sum is known with it


def parse_metrics(
    page: bytes, *, scraped_at_s: float, rank: int = 0, more: EngineGauges = NO_MORE_GAUGES
) -> MetricsPage:
    """Read `page`, scraped at `scraped_at_s` on the core's clock, for the endpoint of `rank`.

    A page of a data-parallel engine has one series a rank: the one labelled `rank` is taken, and
    where no label says so, all of them together (sum of requests, highest usage). `more`: names that are
    looked for first.
    """
    found: dict[str, list[_Sample]] = {}
    page = b"\n" + page  # so that every line begins with its line end
    labels_bytes = MAX_PAGE_LABELS_BYTES
    for name, needle in (*_NEEDLES, *_needles_of(more)):
        if samples := _samples(page, needle, labels_bytes):
            found[name] = samples
            labels_bytes -= sum(len(sample.labels) for sample in samples)
    waiting, running, usages = _told_apart(found, more) if any(more) else _OWN_NAMES
    info_labels = _info_labels(found.get(wire.ENGINE_INFO, ()), rank)
    info = _engine_info(info_labels)
    usage = _gauge(found, usages, rank)
    kv_usage = None if not usage or max(usage) > 1.0 else max(usage)
    metrics = EndpointMetrics(
        scraped_at_s=scraped_at_s,
        waiting_requests=_total(_gauge(found, waiting, rank)),
        running_requests=_total(_gauge(found, running, rank)),
        kv_usage=kv_usage,
        block_size_tokens=info.block_size_tokens if info else _cache_block_size(found, rank),
        info=info,
        model_name=_model_name(found, rank),
        asleep=_asleep(found.get(_SLEEP, ()), rank),
        cache_tokens=_cache_tokens(found, rank),
        loras=read_lora_state((s.read_labels(), s.value) for s in found.get(_LORA, ())),
    )
    return MetricsPage(metrics, info_labels, _peer_refused(found.get(wire.PEER_REFUSED_TOTAL, ())))


def _needles_of(more: EngineGauges) -> list[tuple[str, bytes]]:
    names = dict.fromkeys(spec.name for specs in more for spec in specs if spec.name not in _NAMES)
    return [(name, b"\n" + name.encode()) for name in names]


def _told_apart(found: dict[str, list[_Sample]], more: EngineGauges) -> tuple[tuple[str, ...], ...]:
    """Keys of `found` under which waiting, running and usage are, the configured ones first. Mutates: adds
    the samples of each spec under its key."""
    for spec in {spec for specs in more for spec in specs if spec.labels}:
        kept = [sample for sample in found.get(spec.name, ()) if spec.fits(sample.read_labels())]
        if kept:
            found[spec.key] = kept
    keys = (tuple(spec.key for spec in specs) for specs in more)
    return tuple((*first, *own) for first, own in zip(keys, _OWN_NAMES, strict=True))


def _samples(page: bytes, needle: bytes, labels_bytes: int) -> list[_Sample]:
    """All samples of one name, as far as `labels_bytes` and `MAX_SAMPLES` go."""
    samples: list[_Sample] = []
    at = page.find(needle)
    while at >= 0:
        after = at + len(needle)
        sample = _sample(page, after)
        if sample is not None:
            labels_bytes -= len(sample.labels)
            if labels_bytes < 0 or len(samples) == MAX_SAMPLES:
                samples.append(_UNREAD)
                break
            samples.append(sample)
        at = page.find(needle, after)
    return samples


def _sample(page: bytes, after: int) -> _Sample | None:
    """The sample whose name ends at `after`; None if that was another name, or no sample."""
    if page[after : after + 1] not in _AFTER_NAME:
        return None
    limit = after + MAX_LABELS_BYTES + _MAX_VALUE_BYTES
    end = page.find(b"\n", after, limit)
    if end < 0 and len(page) > limit:
        return _UNREAD
    match = _SAMPLE.match(page, after, end if end >= 0 else len(page))
    if match is None:
        return None
    labels = match[1] or b""
    return _Sample(labels, _number(match[2])) if len(labels) <= MAX_LABELS_BYTES else _UNREAD


def _gauge(found: Mapping[str, list[_Sample]], names: Sequence[str], rank: int) -> list[float] | None:
    """Values of the first of `names` on the page; None if it is absent or one value is unusable."""
    samples: Sequence[_Sample] = next((found[name] for name in names if name in found), ())
    values = [sample.value for sample in _of_rank(samples, rank)]
    known = [value for value in values if value is not None]
    return known if known and len(known) == len(values) else None


def _total(values: list[float] | None) -> float | None:
    total = math.inf if values is None else math.fsum(values) if len(values) > 1 else values[0]
    return total if math.isfinite(total) else None


def _of_rank(samples: Sequence[_Sample], rank: int) -> Sequence[_Sample]:
    if len(samples) < 2:
        return samples
    wanted = str(rank)
    own = [sample for sample in samples if wanted in map(sample.read_labels().get, _ENGINE_LABELS)]
    return own or samples


def _asleep(samples: Sequence[_Sample], rank: int) -> bool | None:
    """None where the page does not say which state the engine is in."""
    states = {s.read_labels().get("sleep_state"): s.value for s in _of_rank(samples, rank)}
    if states.get("awake") == 0.0 or any(states.get(level) == 1.0 for level in _SLEEP_LEVELS):
        return True
    return False if states.get("awake") == 1.0 else None


def _cache_block_size(found: Mapping[str, list[_Sample]], rank: int) -> int | None:
    for name, label in _CACHE_CONFIG.items():
        sizes = {
            _block_size(sample.read_labels().get(label, "")) for sample in _of_rank(found.get(name, ()), rank)
        }
        if len(sizes) == 1:
            return sizes.pop()
    return None


def _cache_tokens(found: Mapping[str, list[_Sample]], rank: int) -> int | None:
    """Tokens that the device cache holds, where exactly one row says so."""
    for name, label in _CACHE_CONFIG.items():
        rows = [sample.read_labels() for sample in _of_rank(found.get(name, ()), rank)]
        if len(rows) == 1:
            size = _block_size(rows[0].get(label, ""))
            blocks = next((rows[0][name] for name in _CACHE_BLOCKS if name in rows[0]), "")
            if size is not None and blocks.isascii() and blocks.isdigit() and 0 < len(blocks) <= 9:
                return size * int(blocks) or None
    return None


def _model_name(found: Mapping[str, list[_Sample]], rank: int) -> str | None:
    """Name of the base model, with which an engine labels its gauges; None where they do not agree."""
    samples = next((found[name] for name in (*_RUNNING, *_WAITING) if name in found), ())
    names = {sample.read_labels().get("model_name") for sample in _of_rank(samples, rank)}
    return names.pop() or None if len(names) == 1 else None


def _info_labels(samples: Sequence[_Sample], rank: int) -> dict[str, str]:
    """Labels of the one `kvpull_engine_info` that speaks for `rank`; empty if there is none or two."""
    rows = [sample.read_labels() for sample in samples if sample.value == 1.0]
    if len(rows) > 1:
        rows = [row for row in rows if row.get("rank") == str(rank)]
    if len(rows) != 1:
        return {}
    return {name: rows[0][name] for name in wire.ENGINE_INFO_LABELS if name in rows[0]}


def _engine_info(labels: Mapping[str, str]) -> EngineInfo | None:
    """None where a field that decides about pulls is missing: such an engine stays unverified."""
    block_size_tokens = _block_size(labels.get("block_size", ""))
    required = ("instance", "hash_algo", "seed_fp", "model_fp", "layout_fp", "protocol")
    if block_size_tokens is None or not all(labels.get(name) for name in required):
        return None
    return EngineInfo(
        instance=labels["instance"],
        block_size_tokens=block_size_tokens,
        hash_algo=labels["hash_algo"],
        seed_fp=labels["seed_fp"],
        model_fp=labels["model_fp"],
        layout_fp=labels["layout_fp"],
        protocol=labels["protocol"],
        p2p_addr=labels.get("p2p_addr", ""),
    )


def _peer_refused(samples: Sequence[_Sample]) -> dict[tuple[str, str], float]:
    refused: dict[tuple[str, str], float] = {}
    for sample in samples[:MAX_REFUSED_SERIES]:
        labels = sample.read_labels()
        if sample.value is not None and "peer" in labels and "reason" in labels:
            refused[labels["peer"], labels["reason"]] = sample.value
    return refused


def _block_size(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 7):
        return None
    return int(text) if 1 <= int(text) <= MAX_BLOCK_SIZE_TOKENS else None


def _number(text: bytes) -> float | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPES[match[0]], text) if "\\" in text else text
