"""Producers and consumers: who reads what of whom, resolved before anything is built, and kept to be shown.

A consumer is satisfied by the producer it names, or by the only one configured, or, where there is
none, by the reference's default, which is added and shown. It is never satisfied by another one than the
one it names, and two that would both do are an error: which of them it gets must not be a surprise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from epp.config.instances import Configured, default_plugin, only
from epp.core.errors import ConfigError
from epp.plugins import producers
from epp.plugins.plugin_type import (
    PLACED,
    PRECISE,
    Data,
    HeaderSource,
    Inputs,
    Need,
    TierWeights,
    TopologyLabels,
)
from epp.plugins.registry import DEFAULT_PRODUCERS
from epp.plugins.topology import TopologyExtractorParameters

PRECISE_PRODUCER = "precise-prefix-cache-producer"
P2P_PRODUCER = "p2p-source-producer"
METRICS_SOURCE = "metrics-data-source"
EXACT_TOKENS_NEEDED = (
    f"{PRECISE_PRODUCER} matches the engines' own tokens and would match nothing. Set token-producer's "
    "parameters.local.path to a directory with the model's tokenizer.json and chat template, or "
    "parameters.vllm.url to a vLLM that runs with --enable-scale-out"
)

How = Literal["named", "only one", "default"]


@dataclass(frozen=True, slots=True)
class Edge:
    """`consumer` reads `data` of `producer`."""

    consumer: str
    data: Data
    producer: str
    how: How


@dataclass(slots=True)
class Wiring:
    """All plugins, those that were added among them, and what reads what."""

    plugins: dict[str, Configured]
    edges: list[Edge] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def producer_of(self, consumer: str, data: Data) -> Configured | None:
        names = [e.producer for e in self.edges if e.consumer == consumer and e.data is data]
        return self.plugins[names[0]] if names else None


def wire(plugins: Mapping[str, Configured], origin: str, *, inject_defaults: bool = True) -> Wiring:
    """Raises ConfigError: a need that nobody, or more than one, would satisfy."""
    wiring = Wiring(dict(plugins))
    waiting = list(plugins.values())
    while waiting:
        consumer = waiting.pop(0)
        for need in consumer.row.needs:
            if need.when(consumer.parameters):
                added = _satisfy(wiring, consumer, need, origin, inject_defaults)
                waiting += added
    return wiring


def _satisfy(
    wiring: Wiring, consumer: Configured, need: Need, origin: str, inject_defaults: bool
) -> list[Configured]:
    """Mutates the wiring. Returns what had to be added."""
    wanted = getattr(consumer.parameters, need.parameter) if need.parameter else None
    default = DEFAULT_PRODUCERS[need.data]
    providers = [p for p in wiring.plugins.values() if p.row.provides is need.data]
    if consumer.row.type_name == P2P_PRODUCER:
        providers = _precise_only(consumer, wanted, providers, origin)
    if wanted is not None:
        if any(p.name == wanted for p in providers):
            wiring.edges.append(Edge(consumer.name, need.data, wanted, "named"))
            return []
        if wanted != default or wanted in wiring.plugins:
            raise ConfigError(
                f"{origin}: {consumer.name}.parameters.{_written(consumer, need)}: no producer named "
                f"{wanted!r}; configured are {', '.join(p.name for p in providers) or 'none'}"
            )
    elif len(providers) == 1:
        wiring.edges.append(Edge(consumer.name, need.data, providers[0].name, "only one"))
        _note_other_than_default(wiring, consumer, providers[0], need, default)
        return []
    elif providers and need.parameter is not None:
        raise ConfigError(
            f"{origin}: {consumer.name} does not say whose {need.data.value} it reads, and "
            f"{' and '.join(p.name for p in providers)} are configured: set {_written(consumer, need)}"
        )
    elif providers:
        wiring.edges.append(Edge(consumer.name, need.data, providers[0].name, "only one"))
        return []
    elif need.optional:
        return []
    if need.data is Data.METRICS and not inject_defaults:
        raise ConfigError(
            f"{origin}: {consumer.name} needs {need.data.value}, dataLayer.injectDefaults is false and no "
            f"{default} is configured"
        )
    return _add_default(wiring, consumer, need, default, "named" if wanted else "default")


def _add_default(
    wiring: Wiring, consumer: Configured, need: Need, default: str, how: How
) -> list[Configured]:
    reason = f"{consumer.name} needs {need.data.value}"
    added = [default_plugin(default, reason)]
    has_source = any(p.row.type_name == METRICS_SOURCE for p in wiring.plugins.values())
    if need.data is Data.METRICS and not has_source:
        added.append(default_plugin(METRICS_SOURCE, reason))
    for plugin in added:
        wiring.plugins[plugin.name] = plugin
    wiring.edges.append(Edge(consumer.name, need.data, default, how))
    return added


def _precise_only(
    consumer: Configured, wanted: str | None, providers: list[Configured], origin: str
) -> list[Configured]:
    """A peer can only be asked for blocks that its engine has reported."""
    precise = [p for p in providers if p.row.type_name == PRECISE_PRODUCER]
    if any(p.name == wanted for p in providers if p not in precise):
        raise ConfigError(
            f"{origin}: {consumer.name} names {wanted}, which knows where prompts were sent and not what "
            f"engines hold; name a {PRECISE_PRODUCER}"
        )
    if not precise:
        raise ConfigError(
            f"{origin}: {consumer.name} needs prefix matches that engines report, but no {PRECISE_PRODUCER} "
            "is configured"
        )
    return precise


def _note_other_than_default(
    wiring: Wiring, consumer: Configured, producer: Configured, need: Need, default: str
) -> None:
    if need.parameter is not None and producer.row.type_name != default:
        wiring.notes.append(
            f"{consumer.name} names no producer of its {need.data.value}: it reads {producer.name}, the only "
            f"one configured (the reference would add {default} and read that)"
        )


def _written(consumer: Configured, need: Need) -> str:
    assert need.parameter is not None
    return type(consumer.parameters).model_fields[need.parameter].alias or need.parameter


def inputs_of(wiring: Wiring, consumer: Configured) -> Inputs:
    """What the instance is built with."""
    prefix = wiring.producer_of(consumer.name, Data.PREFIX_MATCH)
    topology = wiring.producer_of(consumer.name, Data.TOPOLOGY)
    labels = topology.parameters if topology else None
    placed = prefix is not None and prefix.row.type_name != PRECISE_PRODUCER
    return Inputs(
        prefix=PLACED if placed else PRECISE,
        tier_weights=TierWeights() if placed else _tier_weights(wiring),
        topology=labels.labels if isinstance(labels, TopologyExtractorParameters) else TopologyLabels(),
        attributes=_attributes(wiring),
    )


def _tier_weights(wiring: Wiring) -> TierWeights:
    """Those of the producer, where it sets any."""
    precise = only(wiring.plugins, PRECISE_PRODUCER, producers.PrecisePrefixCacheProducerParameters)
    configured = precise.indexer_config.kv_cache_backend_configs if precise else []
    named = {backend.name: backend.weight for backend in configured}
    default = TierWeights()
    return TierWeights(named.get("gpu", default.device), named.get("cpu", default.cpu))


def _attributes(wiring: Wiring) -> dict[str, tuple[HeaderSource, ...]]:
    found: dict[str, tuple[HeaderSource, ...]] = {}
    for plugin in wiring.plugins.values():
        if isinstance(plugin.parameters, producers.SessionIdProducerParameters):
            found["session-id"] = (*found.get("session-id", ()), plugin.parameters.source)
        elif isinstance(plugin.parameters, producers.AgentIdentityParameters):
            found["agent-identity"] = plugin.parameters.sources
    return found
