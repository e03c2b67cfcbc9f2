"""A configuration as it was understood: what `kvpull config explain` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from epp.config.instances import Configured
from epp.config.wiring import Wiring
from epp.core.disagg import DisaggProfileHandler, ProfileHandler


@dataclass(frozen=True, slots=True)
class ExplainedPlugin:
    """`parameters` as they are in force, `defaults` the names of those that nobody wrote."""

    name: str
    type_name: str
    kind: str
    parameters: dict[str, Any]
    defaults: tuple[str, ...]
    added: str | None  # why it is here though nobody wrote it


@dataclass(frozen=True, slots=True)
class ExplainedProfile:
    """In the order in which it runs."""

    name: str
    filters: tuple[str, ...]
    scorers: tuple[tuple[str, float], ...]
    picker: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Plain values, JSON types inside. `notes` are the warnings a picker logs at start."""

    plugins: tuple[ExplainedPlugin, ...]
    wiring: tuple[tuple[str, str, str, str], ...]  # consumer, data, producer, how
    profiles: tuple[ExplainedProfile, ...]
    stages: tuple[str, ...]
    gates: dict[str, bool]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Keys are part of the interface: scripts and dashboards read them."""
        body = asdict(self)
        names = ("consumer", "data", "producer", "how")
        body["wiring"] = [dict(zip(names, edge, strict=True)) for edge in self.wiring]
        for profile in body["profiles"]:
            profile["scorers"] = [{"name": name, "weight": weight} for name, weight in profile["scorers"]]
        for plugin in body["plugins"]:
            plugin["type"] = plugin.pop("type_name")
        return body


def explain(
    wiring: Wiring, handler: ProfileHandler, gates: dict[str, bool], notes: tuple[str, ...]
) -> Explanation:
    profiles = tuple(
        ExplainedProfile(
            profile.name,
            tuple(plugin.name for plugin in profile.filters),
            tuple((scorer.name, weight) for scorer, weight in profile.scorers),
            profile.picker.name,
        )
        for profile in handler.profiles
    )
    edges = tuple((e.consumer, e.data.value, e.producer, e.how) for e in wiring.edges)
    plugins = tuple(map(_plugin, wiring.plugins.values()))
    return Explanation(plugins, edges, profiles, _stages(handler), gates, notes)


def _plugin(configured: Configured) -> ExplainedPlugin:
    parameters = configured.parameters
    fields = type(parameters).model_fields
    defaults = tuple(
        field.alias or name for name, field in fields.items() if name not in parameters.model_fields_set
    )
    values = parameters.model_dump(mode="json", by_alias=True)
    row = configured.row
    return ExplainedPlugin(configured.name, row.type_name, row.kind.value, values, defaults, configured.added)


def _stages(handler: ProfileHandler) -> tuple[str, ...]:
    if not isinstance(handler, DisaggProfileHandler):
        return (f"{handler.profiles[0].name}: serves and computes",)
    decode, prefill = handler.decode.name, handler.prefill.name if handler.prefill else None
    if prefill is None:
        return (f"{decode}: serves and computes; there is no prefill stage",)
    missing = "decoded without it, and counted" if handler.may_decode_alone else "refused with 503"
    without = f"a request that finds no prefill endpoint is {missing}"
    if handler.prefill_first:
        return (f"{prefill}: computes every prompt", f"{decode}: serves", without)
    decider = getattr(handler.decider, "name", "none")
    return (f"{decode}: serves", f"{prefill}: computes the prompt if {decider} says so", without)
