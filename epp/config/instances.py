"""Configured plugins by name: type known, parameters valid; then, once their inputs are known, built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from pydantic import BaseModel

from epp.config.document import Document, validated
from epp.core.errors import ConfigError
from epp.plugins.parameters import Parameters
from epp.plugins.plugin_type import NO_INPUTS, Inputs, PluginType
from epp.plugins.registry import NOT_SUPPORTED, PLUGIN_TYPES

_P = TypeVar("_P", bound=Parameters)


@dataclass(frozen=True, slots=True)
class Configured:
    """A plugin before it is built. `added` says why it is here though nobody wrote it."""

    name: str
    row: PluginType
    parameters: Parameters
    where: str  # path inside the document
    added: str | None = None


@dataclass(frozen=True, slots=True)
class Instance:
    """A plugin that can be used."""

    name: str
    row: PluginType
    parameters: Parameters
    object: object | None
    inputs: Inputs = NO_INPUTS


def read_plugins(document: Document, origin: str) -> dict[str, Configured]:
    """Raises ConfigError: an unknown type, one that is not part of kvpull, a name twice, wrong
    parameters."""
    found: dict[str, Configured] = {}
    # types first: what is not part of kvpull says more than a parameter that refers to it
    rows = [_row(entry.type, f"{origin}: plugins[{n}]") for n, entry in enumerate(document.plugins)]
    for number, (entry, row) in enumerate(zip(document.plugins, rows, strict=True)):
        where = f"{origin}: plugins[{number}]"
        name = entry.name or entry.type
        if name in found:
            raise ConfigError(f"{where}: the name {name!r} is taken; give this plugin a name of its own")
        parameters: Parameters = validated(row.parameters, entry.parameters, f"{where} ({name}).parameters")
        found[name] = Configured(name, row, parameters, f"{where} ({name})")
    return found


def _row(type_name: str, where: str) -> PluginType:
    row = PLUGIN_TYPES.get(type_name)
    if row is not None:
        return row
    if type_name in NOT_SUPPORTED:
        raise ConfigError(f"{where}: {type_name} is not part of kvpull: {NOT_SUPPORTED[type_name]}")
    raise ConfigError(f"{where}: unknown type {type_name!r}; known are {', '.join(sorted(PLUGIN_TYPES))}")


def default_plugin(type_name: str, added: str) -> Configured:
    """One with default parameters, under its type's name."""
    row = PLUGIN_TYPES[type_name]
    return Configured(type_name, row, row.parameters.model_validate({}), type_name, added)


def build(configured: Configured, inputs: Inputs) -> Instance:
    """Raises ConfigError: the inputs do not fit the parameters."""
    row = configured.row
    try:
        made = row.build(configured.name, configured.parameters, inputs) if row.build else None
    except ValueError as error:
        raise ConfigError(f"{configured.where}.parameters.{error}") from error
    return Instance(configured.name, row, configured.parameters, made, inputs)


def set_but_ignored(configured: Configured) -> list[tuple[str, str]]:
    """Parameters that were written and have no effect, as written, each with the reason."""
    found = []
    for path, reason in configured.row.ignored.items():
        model: BaseModel | None = configured.parameters
        written = []
        for name in path.split("."):
            if model is None or name not in model.model_fields_set:
                break
            field = type(model).model_fields[name]
            written.append(field.alias or name)
            value = getattr(model, name)
            model = value if isinstance(value, BaseModel) else None
        else:
            found.append((".".join(written), reason))
    return found


def only(plugins: Mapping[str, Configured], type_name: str, model: type[_P]) -> _P | None:
    """Parameters of the one plugin of this type; None: there is none. Raises ConfigError: there are two."""
    found = [p for p in plugins.values() if p.row.type_name == type_name]
    if len(found) > 1:
        raise ConfigError(f"plugins: {type_name} is configured {len(found)} times; one is allowed")
    return cast(model, found[0].parameters) if found else None  # type: ignore[valid-type]


def resolve(name: str, instances: Mapping[str, Instance], where: str) -> Instance:
    """Raises ConfigError: nobody has that name."""
    instance = instances.get(name)
    if instance is None:
        raise ConfigError(f"{where}: no plugin named {name!r}; configured are {', '.join(sorted(instances))}")
    return instance
