"""Configured plugins by name: type known, parameters valid, instance made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from epp.config.document import Document, validated
from epp.core.errors import ConfigError
from epp.plugins.parameters import Parameters
from epp.plugins.registry import PLUGIN_TYPES, PluginType

_P = TypeVar("_P", bound=Parameters)


@dataclass(frozen=True, slots=True)
class Instance:
    name: str
    row: PluginType
    parameters: Parameters
    object: object | None


def build_instances(document: Document, origin: str) -> dict[str, Instance]:
    instances: dict[str, Instance] = {}
    for number, entry in enumerate(document.plugins):
        where = f"{origin}: plugins[{number}]"
        row = PLUGIN_TYPES.get(entry.type)
        if row is None:
            raise ConfigError(
                f"{where}: unknown type {entry.type!r}; known are {', '.join(sorted(PLUGIN_TYPES))}"
            )
        name = entry.name or entry.type
        if name in instances:
            raise ConfigError(f"{where}: the name {name!r} is taken; give this plugin a name of its own")
        parameters: Parameters = validated(row.parameters, entry.parameters, f"{where} ({name}).parameters")
        built = row.build(name, parameters) if row.build else None
        instances[name] = Instance(name, row, parameters, built)
    return instances


def only(instances: Mapping[str, Instance], type_name: str, model: type[_P]) -> _P | None:
    found = [i for i in instances.values() if i.row.type_name == type_name]
    if len(found) > 1:
        raise ConfigError(f"plugins: {type_name} is configured {len(found)} times; one is allowed")
    return cast(model, found[0].parameters) if found else None  # type: ignore[valid-type]


def resolve(name: str, instances: Mapping[str, Instance], where: str) -> Instance:
    instance = instances.get(name)
    if instance is None:
        raise ConfigError(f"{where}: no plugin named {name!r}; configured are {', '.join(sorted(instances))}")
    return instance
