"""The profile handler: one profile, or decode and prefill with a decider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from epp.config.instances import Instance, resolve
from epp.core.disagg import (
    DataParallelProfileHandler,
    DisaggProfileHandler,
    ProfileHandler,
    SingleProfileHandler,
)
from epp.core.errors import ConfigError
from epp.core.plugin import PrefillDecider
from epp.core.scheduler import Profile
from epp.plugins import producers
from epp.plugins.registry import Kind


def build_handler(
    instances: Mapping[str, Instance], profiles: Mapping[str, Profile], origin: str
) -> ProfileHandler:
    """Raises ConfigError: two handlers, or profiles that do not fit the one."""
    handlers = [i for i in instances.values() if i.row.kind is Kind.PROFILE_HANDLER]
    if len(handlers) > 1:
        raise ConfigError(
            f"{origin}: {' and '.join(h.name for h in handlers)}: one profile handler is allowed"
        )
    if handlers and handlers[0].row.type_name == "disagg-profile-handler":
        return _disagg(handlers[0], instances, profiles, origin)
    name = handlers[0].row.type_name if handlers else "single-profile-handler"
    if len(profiles) != 1:
        raise ConfigError(f"{origin}: {name} takes one profile, found {', '.join(profiles)}")
    profile = next(iter(profiles.values()))
    if handlers and isinstance(handlers[0].parameters, producers.DataParallelProfileHandlerParameters):
        return DataParallelProfileHandler(profile, handlers[0].parameters.primary_port)
    return SingleProfileHandler(profile)


def _disagg(
    handler: Instance, instances: Mapping[str, Instance], profiles: Mapping[str, Profile], origin: str
) -> DisaggProfileHandler:
    parameters = cast(producers.DisaggProfileHandlerParameters, handler.parameters)
    where = f"{origin}: {handler.name}"
    names, prefill_first = parameters.profiles, parameters.stage_order == "prefill-first"
    decider = _decider(parameters, instances, where)
    wanted = [names.decode, *([names.prefill] if prefill_first or decider else [])]
    for name in wanted:
        if name not in profiles:
            raise ConfigError(f"{where}: no profile named {name!r}; configured are {', '.join(profiles)}")
    known = {names.decode, names.prefill, names.encode or "encode"}
    if unused := [name for name in profiles if name not in known]:
        raise ConfigError(f"{where}: no stage runs the profile {unused[0]!r}")
    return DisaggProfileHandler(
        decode=profiles[names.decode],
        prefill=profiles[names.prefill] if len(wanted) == 2 else None,
        decider=decider,
        prefill_first=prefill_first,
        may_decode_alone=parameters.when_no_prefill == "decode",
    )


def _decider(
    parameters: producers.DisaggProfileHandlerParameters, instances: Mapping[str, Instance], where: str
) -> PrefillDecider | None:
    if parameters.deciders.prefill is None:
        return None
    decider = resolve(parameters.deciders.prefill, instances, where)
    if decider.row.kind is not Kind.PREFILL_DECIDER:
        raise ConfigError(f"{where}.deciders.prefill: {decider.name} is a {decider.row.kind.value}")
    return cast(PrefillDecider, decider.object)
