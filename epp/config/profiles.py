"""Scheduling profiles out of references to plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from epp.config.defaults import DEFAULT_PICKER
from epp.config.document import Document, ProfileEntry
from epp.config.instances import Instance, resolve
from epp.core.errors import ConfigError
from epp.core.plugin import Filter, Picker, Scorer
from epp.core.scheduler import Profile
from epp.plugins.registry import Kind


def build_profiles(document: Document, instances: Mapping[str, Instance], origin: str) -> dict[str, Profile]:
    """Raises ConfigError: no profile, a name twice, a plugin that no profile can hold."""
    if not document.scheduling_profiles:
        raise ConfigError(f"{origin}: schedulingProfiles: at least one profile is needed")
    profiles: dict[str, Profile] = {}
    for number, entry in enumerate(document.scheduling_profiles):
        where = f"{origin}: schedulingProfiles[{number}] ({entry.name})"
        if entry.name in profiles:
            raise ConfigError(f"{where}: the name is taken")
        profiles[entry.name] = _profile(entry, instances, where)
    return profiles


def _profile(entry: ProfileEntry, instances: Mapping[str, Instance], where: str) -> Profile:
    filters: list[Filter] = []
    scorers: list[tuple[Scorer, float]] = []
    chosen: list[Picker] = []
    names = [ref.plugin_ref for ref in entry.plugins]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{where}: {twice[0]} is listed twice; give it one weight")
    for ref in entry.plugins:
        instance = resolve(ref.plugin_ref, instances, where)
        kind = instance.row.kind
        if kind in (Kind.FILTER, Kind.DETECTOR):
            filters.append(cast(Filter, instance.object))
        elif kind is Kind.SCORER:
            scorers.append((cast(Scorer, instance.object), ref.weight))
        elif kind is Kind.PICKER:
            chosen.append(cast(Picker, instance.object))
        else:
            raise ConfigError(
                f"{where}: {ref.plugin_ref} is a {kind.value}; a profile takes filters, scorers, a picker"
            )
    if len(chosen) > 1:
        raise ConfigError(f"{where}: {len(chosen)} pickers; one is allowed")
    picker = chosen[0] if chosen else cast(Picker, instances[DEFAULT_PICKER].object)
    return Profile(entry.name, tuple(filters), tuple(scorers), picker)
