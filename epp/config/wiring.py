"""Producers and consumers: a consumer is satisfied by the producer it names or by the only one
configured, never by another one in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from epp.config.instances import Instance, only
from epp.core.errors import ConfigError
from epp.plugins import producers
from epp.plugins.scorers import PrefixCacheScorer, TierWeights

PRECISE_PRODUCER = "precise-prefix-cache-producer"
P2P_PRODUCER = "p2p-source-producer"
EXACT_TOKENS_NEEDED = (
    f"{PRECISE_PRODUCER} matches the engines' own tokens and would match nothing. Set token-producer's "
    "parameters.local.path to a directory with the model's tokenizer.json and chat template, or "
    "parameters.vllm.url to a vLLM that runs with --enable-scale-out"
)


def with_tier_weights(instances: dict[str, Instance]) -> dict[str, Instance]:
    """Give every prefix scorer the tier weights of the producer that feeds it."""
    precise = only(instances, PRECISE_PRODUCER, producers.PrecisePrefixCacheProducerParameters)
    configured = precise.indexer_config.kv_cache_backend_configs if precise else []
    named = {backend.name: backend.weight for backend in configured}
    default = TierWeights()
    weights = TierWeights(named.get("gpu", default.device), named.get("cpu", default.cpu)) if named else None
    if weights is None:
        return instances
    return {
        name: replace(i, object=replace(i.object, weights=weights))
        if isinstance(i.object, PrefixCacheScorer)
        else i
        for name, i in instances.items()
    }


def check_consumers(instances: Mapping[str, Instance], origin: str) -> None:
    """Every consumer of prefix matches must be satisfied by the producer it names."""
    precise = [i.name for i in instances.values() if i.row.type_name == PRECISE_PRODUCER]
    for instance in instances.values():
        if instance.row.type_name not in ("prefix-cache-scorer", P2P_PRODUCER):
            continue
        wanted = getattr(instance.parameters, "prefix_match_info_producer_name", None)
        if wanted is not None and wanted not in precise:
            raise ConfigError(
                f"{origin}: {instance.name}.parameters.prefixMatchInfoProducerName: no producer named "
                f"{wanted!r}; configured are {', '.join(precise) or 'none'}"
            )
        if not precise:
            raise ConfigError(
                f"{origin}: {instance.name} needs prefix matches, but no {PRECISE_PRODUCER} is configured"
            )
