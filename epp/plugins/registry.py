"""Every plugin type we know, one row each, under the reference's names."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from epp.plugins import deciders, filters, pickers, producers, scorers
from epp.plugins.parameters import NoParameters, Parameters


class Kind(enum.Enum):
    """What a plugin type may be used as."""

    FILTER = "filter"
    SCORER = "scorer"
    PICKER = "picker"
    PREFILL_DECIDER = "prefill decider"
    PROFILE_HANDLER = "profile handler"
    PRODUCER = "data producer"
    SOURCE = "data source"
    DISCOVERY = "discovery"


@dataclass(frozen=True, slots=True)
class PluginType:
    """`build` makes the instance; None where the parameters only configure something else."""

    type_name: str
    kind: Kind
    parameters: type[Parameters] = NoParameters
    build: Callable[[str, Any], object] | None = None


def _plain(make: Callable[[str], object]) -> Callable[[str, Any], object]:
    return lambda name, _parameters: make(name)


def _prefix_scorer(name: str, p: scorers.PrefixCacheScorerParameters) -> object:
    return scorers.PrefixCacheScorer(
        name, length_weight=p.match_length_weight, length_scale_tokens=p.match_length_scale_tokens
    )


def _active_request_scorer(name: str, p: scorers.ActiveRequestScorerParameters) -> object:
    return scorers.ActiveRequestScorer(name, p.idle_threshold, p.max_busy_score)


def _max_score_picker(name: str, p: pickers.PickerParameters) -> object:
    return pickers.MaxScorePicker(name, p.max_num_of_endpoints)


def _prefix_based_decider(name: str, p: deciders.PrefixBasedDeciderParameters) -> object:
    return deciders.PrefixBasedDecider(name, p.non_cached_tokens, p.prompt_tokens)


_ROWS = (
    PluginType("decode-filter", Kind.FILTER, build=_plain(filters.decode_filter)),
    PluginType("prefill-filter", Kind.FILTER, build=_plain(filters.prefill_filter)),
    PluginType("prefix-cache-scorer", Kind.SCORER, scorers.PrefixCacheScorerParameters, _prefix_scorer),
    PluginType("queue-scorer", Kind.SCORER, build=_plain(scorers.QueueScorer)),
    PluginType("kv-cache-utilization-scorer", Kind.SCORER, build=_plain(scorers.KvCacheUtilizationScorer)),
    PluginType(
        "active-request-scorer", Kind.SCORER, scorers.ActiveRequestScorerParameters, _active_request_scorer
    ),
    PluginType("max-score-picker", Kind.PICKER, pickers.PickerParameters, _max_score_picker),
    PluginType("always-disagg-pd-decider", Kind.PREFILL_DECIDER, build=_plain(deciders.AlwaysDisaggDecider)),
    PluginType(
        "prefix-based-pd-decider",
        Kind.PREFILL_DECIDER,
        deciders.PrefixBasedDeciderParameters,
        _prefix_based_decider,
    ),
    PluginType("single-profile-handler", Kind.PROFILE_HANDLER),
    PluginType("disagg-profile-handler", Kind.PROFILE_HANDLER, producers.DisaggProfileHandlerParameters),
    PluginType(
        "precise-prefix-cache-producer", Kind.PRODUCER, producers.PrecisePrefixCacheProducerParameters
    ),
    PluginType("p2p-source-producer", Kind.PRODUCER, producers.P2PSourceProducerParameters),
    PluginType("token-producer", Kind.PRODUCER, producers.TokenProducerParameters),
    PluginType("endpoint-notification-source", Kind.SOURCE),
    PluginType("metrics-data-source", Kind.SOURCE),
    PluginType("core-metrics-extractor", Kind.SOURCE),
    PluginType("file-discovery", Kind.DISCOVERY, producers.FileDiscoveryParameters),
)

PLUGIN_TYPES: Mapping[str, PluginType] = {row.type_name: row for row in _ROWS}
