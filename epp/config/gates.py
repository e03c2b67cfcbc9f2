"""Feature gates: `name` or `name=true|false`; unknown ones are errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from epp.core.errors import ConfigError

FLOW_CONTROL = "flowControl"
HA_POPULATE = "haPopulateNonLeaderDatastore"
DEFAULTS: Mapping[str, bool] = {FLOW_CONTROL: False, HA_POPULATE: True}


def read_gates(written: Iterable[str], origin: str) -> dict[str, bool]:
    """All gates with their value. Raises ConfigError."""
    gates = dict(DEFAULTS)
    for number, text in enumerate(written):
        name, equals, value = text.partition("=")
        if name not in DEFAULTS or (equals and value not in ("true", "false")):
            raise ConfigError(
                f"{origin}: featureGates[{number}]: {text!r}: known are {', '.join(DEFAULTS)}, alone or with "
                "=true or =false"
            )
        gates[name] = value != "false"
    return gates
