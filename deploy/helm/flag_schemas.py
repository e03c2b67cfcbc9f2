"""JSON schemas of the flags that `router.epp.flags` and `engine.sidecar.flags` may name: those of the real
parsers but for the ones that the chart sets by values of their own. So a misspelt flag ends `helm install`,
not the pod.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final

from epp import cli, flag_values
from sidecar import flags as sidecar_flags

# set by other values, or without meaning in a pod
_EPP_SET: Final = """
config-file config-text pool-name pool-namespace pool-group endpoint-selector endpoint-target-ports
thresholds-configmap tokenizer grpc-port grpc-health-port metrics-port metrics-cert-dir metrics-client-ca-file
debug-token-file routing-key-file
salt-key-file secure-serving cert-path snapshot-port sibling sibling-tls-path sibling-server-name
snapshot-timeout drain-timeout lame-duck log-level objectives-group ha-mode ha-lease-name tracing help
ready-fd
"""
_SIDECAR_SET: Final = """
port model-server-port vllm-port data-parallel-size kv-connector enable-p2p-pull p2p-connector-port
inference-pool pool-group enable-ssrf-protection routing-key-file secure-proxy metrics-port
metrics-cert-dir tracing
pod-ip rank help ready-fd configuration configuration-file
"""
EPP_SET: Final = frozenset(_EPP_SET.split())
SIDECAR_SET: Final = frozenset(_SIDECAR_SET.split())
_SCALAR: Final = {"type": ["string", "number", "boolean"]}
_BOOLEAN: Final = {"enum": [True, False, "true", "false"]}
_PORT: Final = {"type": "integer", "minimum": 0, "maximum": 65535}
_LIST: Final = {"type": ["string", "array"]}


def epp_parser() -> argparse.ArgumentParser:
    """The parser of `kvpull epp`."""
    return command_parser("epp")


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a sub-command of `kvpull`."""
    actions = cli.parser()._subparsers
    assert actions is not None
    found: argparse.ArgumentParser = actions._group_actions[0].choices[name]  # type: ignore[index]
    return found


def sidecar_parser() -> argparse.ArgumentParser:
    """The parser of `kvpull-sidecar`, without an environment."""
    return sidecar_flags._parser({})


def names(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Long names without dashes."""
    return {
        option.removeprefix("--"): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _flags(parser: argparse.ArgumentParser, taken: frozenset[str]) -> dict[str, Any]:
    known = {name: action for name, action in names(parser).items() if name not in taken}
    shown = {name: a for name, a in known.items() if a.help is not argparse.SUPPRESS}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _value(action) for name, action in sorted(shown.items())},
    }


def _value(action: argparse.Action) -> dict[str, Any]:
    if action.choices is not None:
        return {"enum": list(action.choices)}
    if action.type in (flag_values.boolean, sidecar_flags._boolean):
        return dict(_BOOLEAN)
    if action.type in (flag_values.port, sidecar_flags._port, sidecar_flags._port0):
        return dict(_PORT)
    repeatable = isinstance(action, argparse._AppendAction | argparse._ExtendAction)
    return dict(_LIST if repeatable else _SCALAR)


SCHEMAS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "FLAGS": lambda: _flags(epp_parser(), EPP_SET),
    "SIDECAR_FLAGS": lambda: _flags(sidecar_parser(), SIDECAR_SET),
}
