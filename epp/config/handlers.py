"""The profile handler: one profile, or decode and prefill with a decider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from epp.config.instances import Instance, resolve
from epp.core.disagg import DisaggProfileHandler, ProfileHandler, SingleProfileHandler
from epp.core.errors import ConfigError
from epp.core.plugin import PrefillDecider
from epp.core.scheduler import Profile
from epp.plugins import producers
from epp.plugins.registry import Kind


def build_handler(
    instances: Mapping[str, Instance], profiles: Mapping[str, Profile], origin: str
) -> ProfileHandler:
    handlers = [i for i in instances.values() if i.row.kind is Kind.PROFILE_HANDLER]
    if len(handlers) > 1:
        raise ConfigError(
            f"{origin}: {' and '.join(h.name for h in handlers)}: one profile handler is allowed"
        )
    if handlers and handlers[0].row.type_name == "disagg-profile-handler":
        return _disagg(handlers[0], instances, profiles, origin)
    if len(profiles) != 1:
        raise ConfigError(f"{origin}: single-profile-handler takes one profile, found {', '.join(profiles)}")
    return SingleProfileHandler(next(iter(profiles.values())))


def _disagg(
    handler: Instance, instances: Mapping[str, Instance], profiles: Mapping[str, Profile], origin: str
) -> DisaggProfileHandler:
    parameters = cast(producers.DisaggProfileHandlerParameters, handler.parameters)
    where = f"{origin}: {handler.name}"
    decider = resolve(parameters.deciders.prefill, instances, where)
    if decider.row.kind is not Kind.PREFILL_DECIDER:
        raise ConfigError(f"{where}.deciders.prefill: {decider.name} is a {decider.row.kind.value}")
    for name in (parameters.profiles.decode, parameters.profiles.prefill):
        if name not in profiles:
            raise ConfigError(f"{where}: no profile named {name!r}; configured are {', '.join(profiles)}")
    return DisaggProfileHandler(
        decode=profiles[parameters.profiles.decode],
        prefill=profiles[parameters.profiles.prefill],
        decider=cast(PrefillDecider, decider.object),
    )
