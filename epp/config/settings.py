"""The picker's settings out of what was configured."""

from __future__ import annotations

from collections.abc import Mapping

from epp.config.instances import Instance, only
from epp.config.wiring import P2P_PRODUCER, PRECISE_PRODUCER, Wiring
from epp.core.approx_prefix import ApproxSettings
from epp.core.disagg import DisaggProfileHandler, ProfileHandler
from epp.core.endpoint_picker import PickerSettings
from epp.core.errors import ConfigError
from epp.core.load_ledger import LoadEstimate
from epp.core.next_turn import NextTurns
from epp.core.plugin import Follower, HeaderReader, LooksAhead, SourceChooser
from epp.core.source_selector import SourceProducer
from epp.plugins import producers
from epp.plugins.next_turn import NextTurnPrefetcher
from epp.plugins.plugin_type import PLACED, PRECISE, Data

APPROX_PRODUCER = "approx-prefix-cache-producer"
MIN_APPROX_BLOCK_TOKENS = 64  # as in the reference


def build_settings(
    wiring: Wiring,
    instances: Mapping[str, Instance],
    handler: ProfileHandler,
    tokens: producers.TokenProducerParameters | None,
) -> PickerSettings:
    source = only(wiring.plugins, P2P_PRODUCER, producers.P2PSourceProducerParameters)
    objects = [*_objects(handler), *_prefetchers(instances)]
    readers = [o.header_names for o in objects if isinstance(o, HeaderReader)]
    return PickerSettings(
        handler=handler,
        source_producer=SourceProducer(source.min_cached_token_delta) if source else None,
        base_models=_base_models(tokens),
        approx=_approx(wiring),
        estimate=_estimate(wiring),
        followers=tuple(o for o in objects if isinstance(o, Follower)),
        identity_headers=_identity_headers(wiring),
        header_names=frozenset().union(*readers),
        looks_ahead=any(o.looks_ahead for o in objects if isinstance(o, LooksAhead)),
        next_turns=_next_turns(instances),
        source_choosers=tuple(o for o in objects if isinstance(o, SourceChooser)),
    )


def _objects(handler: ProfileHandler) -> list[object]:
    """Every plugin in use, once."""
    found: list[object] = []
    for profile in handler.profiles:
        scorers = [scorer for scorer, _ in profile.scorers]
        for plugin in (*profile.filters, *scorers, profile.picker):
            if not any(plugin is other for other in found):
                found.append(plugin)
    if isinstance(handler, DisaggProfileHandler) and handler.decider is not None:
        found.append(handler.decider)
    return found


def _identity_headers(wiring: Wiring) -> tuple[str, ...]:
    identity = only(wiring.plugins, "agent-identity", producers.AgentIdentityParameters)
    return () if identity is None else identity.header_names


def _prefetchers(instances: Mapping[str, Instance]) -> list[NextTurnPrefetcher]:
    return [i.object for i in instances.values() if isinstance(i.object, NextTurnPrefetcher)]


def _next_turns(instances: Mapping[str, Instance]) -> NextTurns | None:
    """Raises ConfigError: there are two."""
    found = _prefetchers(instances)
    if len(found) > 1:
        raise ConfigError(f"plugins: {found[0].name} is one of {len(found)} prefetchers; one is allowed")
    return found[0].turns if found else None


def _base_models(tokens: producers.TokenProducerParameters | None) -> tuple[str, ...]:
    if tokens is None:
        return ()
    return (*([tokens.model_name] if tokens.model_name else []), *tokens.served_model_names)


def _approx(wiring: Wiring) -> ApproxSettings | None:
    parameters = only(wiring.plugins, APPROX_PRODUCER, producers.ApproxPrefixCacheProducerParameters)
    if parameters is None:
        return None
    block_tokens = max(MIN_APPROX_BLOCK_TOKENS, parameters.block_size_tokens)
    most_tokens = parameters.max_prefix_tokens_to_match or (
        parameters.max_prefix_blocks_to_match * block_tokens
    )
    return ApproxSettings(
        block_size_tokens=block_tokens,
        max_blocks=most_tokens // block_tokens,
        capacity_blocks=parameters.lru_capacity_per_server,
        auto_tune=parameters.auto_tune,
    )


def _estimate(wiring: Wiring) -> LoadEstimate:
    """How the in-flight producer counts; without one as its defaults say."""
    names = [p.name for p in wiring.plugins.values() if p.row.provides is Data.INFLIGHT_LOAD]
    parameters = wiring.plugins[names[0]].parameters if names else None
    if not isinstance(parameters, producers.InflightLoadProducerParameters):
        parameters = producers.InflightLoadProducerParameters()
    own = wiring.producer_of(names[0], Data.PREFIX_MATCH) if names else None
    precise = any(p.row.type_name == PRECISE_PRODUCER for p in wiring.plugins.values())
    from_placements = own.row.type_name == APPROX_PRODUCER if own else not precise
    return LoadEstimate(
        prefix=PLACED if from_placements else PRECISE,
        output_ratio=parameters.output_ratio if parameters.add_estimated_output_tokens else 0.0,
        max_output_tokens=parameters.max_estimated_output_tokens,
    )
