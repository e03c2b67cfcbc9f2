"""`flowControl` and admission: bands, limits, the saturation detector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from epp.config.document import BandEntry, Document, FlowControl
from epp.config.instances import Configured, Instance, default_plugin, resolve
from epp.core.errors import ConfigError
from epp.core.flow.bands import NO_LIMIT, BandSettings, Fairness, FlowSettings, Ordering
from epp.core.flow.usage_limits import UsageLimit
from epp.core.plugin import SaturationDetector
from epp.plugins.flow_policies import (
    DEFAULT_FAIRNESS,
    DEFAULT_ORDERING,
    ProgramAwareParameters,
    StaticUsageLimitParameters,
)
from epp.plugins.registry import Kind

DEFAULT_DETECTOR = "utilization-detector"


@dataclass(frozen=True, slots=True)
class Admission:
    """How much may be sent. `flow` None: nothing waits; at saturation, requests of a priority below 0 are
    refused. The pool is full when what `detector` says reaches `usage_limit`."""

    detector: SaturationDetector
    flow: FlowSettings | None = None
    usage_limit: float = 1.0


def flow_defaults(document: Document, plugins: Mapping[str, Configured], gate: bool) -> dict[str, Configured]:
    """Policies and the detector that have to be added, by name."""
    added = {}
    needed = document.detector_ref is None and (gate or document.flow_control is not None)
    if needed and DEFAULT_DETECTOR not in plugins:
        added[DEFAULT_DETECTOR] = default_plugin(DEFAULT_DETECTOR, "flowControl names no detector")
    if gate:
        bands = _bands(document.flow_control or FlowControl())
        for name, refs in (
            (DEFAULT_FAIRNESS, [band.fairness_policy_ref for band in bands]),
            (DEFAULT_ORDERING, [band.ordering_policy_ref for band in bands]),
        ):
            if name not in plugins and any(ref in (None, name) for ref in refs):
                added[name] = default_plugin(name, "a priority band names no other")
    return added


def _bands(flow: FlowControl) -> list[BandEntry]:
    negative = flow.default_negative_priority_band
    return [flow.default_priority_band, *([negative] if negative else []), *flow.priority_bands]


def build_admission(
    document: Document, instances: Mapping[str, Instance], gate: bool, origin: str
) -> Admission | None:
    """None: no detector is configured, and nothing is ever refused for load."""
    where = f"{origin}: flowControl"
    if document.detector_ref is None and not gate and document.flow_control is None:
        return None
    name = document.detector_ref or DEFAULT_DETECTOR
    detector = _of_kind(name, Kind.DETECTOR, instances, f"{where}.saturationDetector")
    flow = document.flow_control or FlowControl()
    level, limit = _usage_limit(flow, instances, where)
    settings = replace(_flow(flow, instances, where), usage_limit=limit)
    return Admission(cast(SaturationDetector, detector.object), settings if gate else None, level)


def _flow(flow: FlowControl, instances: Mapping[str, Instance], where: str) -> FlowSettings:
    if flow.enable_eviction:
        raise ConfigError(
            f"{where}.enableEviction is not part of kvpull: requests that run are never killed; "
            "priority-holdback-policy keeps room for higher priorities"
        )
    bands: dict[int, BandSettings] = {}
    for number, entry in enumerate(flow.priority_bands):
        path = f"{where}.priorityBands[{number}]"
        if entry.priority is None or entry.priority in bands:
            raise ConfigError(f"{path}: every band needs a priority of its own")
        bands[entry.priority] = _band(entry, instances, path)
    default = _band(flow.default_priority_band, instances, f"{where}.defaultPriorityBand")
    negative = flow.default_negative_priority_band
    absent_s = flow.no_endpoint_request_ttl
    return FlowSettings(
        max_bytes=NO_LIMIT if flow.max_bytes is None else flow.max_bytes,
        max_requests=NO_LIMIT if flow.max_requests is None else flow.max_requests,
        ttl_s=flow.default_request_ttl or None,
        no_endpoint_ttl_s=(flow.default_request_ttl if absent_s is None else absent_s) or None,
        default_band=default,
        default_negative_band=_band(negative, instances, f"{where}.defaultNegativePriorityBand")
        if negative
        else default,
        bands=bands,
    )


def _band(entry: BandEntry, instances: Mapping[str, Instance], where: str) -> BandSettings:
    fairness = _policy(entry.fairness_policy_ref, DEFAULT_FAIRNESS, Kind.FAIRNESS, instances, where)
    ordering = _policy(entry.ordering_policy_ref, DEFAULT_ORDERING, Kind.ORDERING, instances, where)
    program = fairness.parameters if fairness else None
    known = program if isinstance(program, ProgramAwareParameters) else ProgramAwareParameters()
    return BandSettings(
        entry.max_bytes,
        entry.max_requests,
        entry.default_request_ttl,
        Fairness(fairness.row.type_name if fairness else DEFAULT_FAIRNESS),
        Ordering(ordering.row.type_name if ordering else DEFAULT_ORDERING),
        known.las_half_life_seconds,
        known.las_weight_service,
        known.las_weight_head_wait,
    )


def _policy(
    ref: str | None, default: str, kind: Kind, instances: Mapping[str, Instance], where: str
) -> Instance | None:
    """None: the default, which is not there without the gate."""
    if (ref is None or ref == default) and default not in instances:
        return None
    return _of_kind(ref or default, kind, instances, where)


def _usage_limit(
    flow: FlowControl, instances: Mapping[str, Instance], where: str
) -> tuple[float, UsageLimit | None]:
    """The saturation that counts as full, and what holds priorities back before it."""
    if flow.usage_limit_policy_plugin_ref is None:
        return 1.0, None
    policy = _of_kind(flow.usage_limit_policy_plugin_ref, Kind.USAGE_LIMIT, instances, where)
    if isinstance(policy.parameters, StaticUsageLimitParameters):
        return policy.parameters.threshold, None
    return 1.0, cast(UsageLimit, policy.object)


def _of_kind(name: str, kind: Kind, instances: Mapping[str, Instance], where: str) -> Instance:
    found = resolve(name, instances, where)
    if found.row.kind is not kind:
        raise ConfigError(f"{where}: {name} is a {found.row.kind.value}, not a {kind.value}")
    return found
