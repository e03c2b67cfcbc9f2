"""The command line and its YAML form: names, defaults and the form of every value.

Names and defaults are those of llm-d-router `pd-sidecar` at ebab687. What we do not do is refused by
name with what to use instead (accepting and ignoring would be a lie), except at the value that means
"off", which manifests like to spell out. Flags are Go style: `--x`, `--x=false`. What the settings
mean together is `config`'s business.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from engine_plugin import wire as engine_wire
from sidecar.durations import positive_duration_flag_s
from sidecar.endpoint import MAX_PORT
from sidecar.pool_watch.resources import POOL_GROUP
from sidecar.yaml_text import YamlTextError, load_yaml, read_text

MAX_YAML_BYTES: Final = 1 << 20
_BOOLEANS: Final = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}
_LOG_LEVELS: Final = {
    "debug": "DEBUG",
    "info": "INFO",
    "error": "ERROR",
    "warn": "WARNING",
    "warning": "WARNING",
}
LEGS: Final = ("prefiller", "decoder")  # what `--enable-tls` may name

# flags of the reference without our own meaning: what to use instead, and the values that are harmless
_UNSUPPORTED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "ec-connector": ("encoder disaggregation is not supported", ("",)),
    "decode-chunk-size": ("chunked decode is not supported", ("0",)),
}
_UNSUPPORTED_PREFIXES: Final = {"moriio-": "MoRI-IO is not supported"}
_CONFIGURATION: Final = ("configuration", "configuration-file")


class ConfigError(ValueError):
    """The settings cannot be used; the message is one sentence that names the flag."""


def parse_flags(argv: Sequence[str], env: Mapping[str, str]) -> argparse.Namespace:
    """Values of flags, of the YAML that they name (a flag on the command line wins), and of the
    environment variables `POD_IP`, `P2P_CONNECTOR_PORT`, `ENABLE_PREFILLER_SAMPLING` and
    `SGLANG_BOOTSTRAP_PORT`.

    Raises:
        ConfigError: an unknown or unsupported name, or a value of a wrong form.
        SystemExit: `--help`.
    """
    given = list(argv)
    parser = _parser(env)
    first, _ = _configuration_parser().parse_known_args(given)
    args = parser.parse_args([*_yaml_flags(first, parser), *given])
    for name, (instead, harmless) in _UNSUPPORTED.items():
        value = getattr(args, name.replace("-", "_"))
        if value is not None and value not in harmless:
            raise ConfigError(f"--{name}: {instead}")
    return args


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        for prefix, instead in _UNSUPPORTED_PREFIXES.items():
            if f"--{prefix}" in message:
                raise ConfigError(f"--{prefix}*: {instead}")
        raise ConfigError(message)


def _configuration_parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in _CONFIGURATION:
        parser.add_argument(f"--{name}", default=None)
    return parser


def _parser(env: Mapping[str, str]) -> _Parser:
    parser = _Parser(prog="kvpull-sidecar", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--configuration", default=None, help="flags as YAML text: `name: value`")
    add("--configuration-file", default=None, help="the same in a file")
    add("--listen-host", default="0.0.0.0", help="address to bind (default: all)")
    add("--port", type=_port, default=8000, help="serving port of rank 0")
    add("--model-server-host", default="127.0.0.1", help="where the engine listens")
    add("--model-server-port", "--vllm-port", type=_port, default=8200, help="HTTP port of rank 0")
    add("--pod-ip", default=env.get("POD_IP"), help="own address in routing headers (POD_IP)")
    add("--data-parallel-size", type=_count, default=1, help="ranks of this pod")
    add("--rank", type=int, default=None, help="serve one rank only")
    add("--app-protocol", default="http", help="appProtocol of the pool: http (HTTP/1.1)")
    _add_routing(parser, env)
    _add_limits(parser)
    _add_tls(parser)
    _flag(parser, "--tracing", False, "send spans as the OTEL_* variables say; context is always passed on")
    add("--metrics-port", type=_port0, default=0, help="0: off")
    add("--metrics-cert-dir", type=Path, default=None, help="TLS there: tls.crt and tls.key, reloaded")
    add("--ready-fd", type=int, default=None, help="write one JSON line there when serving")
    add("--zap-log-level", "--log-level", type=_log_level, default="INFO", help="debug, info, error")
    for name in _UNSUPPORTED:
        add(f"--{name}", nargs="?", const="true", default=None, help=argparse.SUPPRESS)
    return parser


def _add_routing(parser: _Parser, env: Mapping[str, str]) -> None:
    add = parser.add_argument
    add("--kv-connector", default="nixlv2", help="offloading, nixlv2; experimental: sglang, mooncake")
    _flag(parser, "--enable-p2p-pull", False, "pull prefix blocks with nixlv2")
    p2p_port = env.get("P2P_CONNECTOR_PORT", str(engine_wire.P2P_PORT))
    add("--p2p-connector-port", type=_port, default=p2p_port, help="P2P port of rank 0")
    bootstrap_port = env.get("SGLANG_BOOTSTRAP_PORT", "8998")
    add("--mooncake-bootstrap-port", type=_port, default=8998, help="of every prefiller")
    add("--sglang-bootstrap-port", type=_port, default=bootstrap_port, help="of every prefiller")
    _flag(parser, "--enable-ssrf-protection", True, "talk to members of the pool only")
    add("--endpoints-file", type=Path, default=None, help="static endpoint file: the allow-list")
    pool = env.get("INFERENCE_POOL")
    add("--inference-pool", default=pool, help="namespace/name of the pool: the allow-list in a cluster")
    add("--pool-group", default=POOL_GROUP, help="API group of the InferencePool")
    add("--routing-key-file", type=Path, default=None, help="key of x-kvpull-routing-auth")
    sampling = env.get("ENABLE_PREFILLER_SAMPLING", "false")
    _flag(parser, "--enable-prefiller-sampling", sampling, "start anywhere in a prefiller list")
    add("--prefill-max-retries", type=_count0, default=0, help="more attempts of a failed prefill leg")
    add("--prefill-retry-backoff", type=positive_duration_flag_s, default=0.2, help="pause before each")
    add("--prefill-failure-policy", choices=("local", "error"), default=None, help="local; sglang: error")


def _add_limits(parser: _Parser) -> None:
    add = parser.add_argument
    add("--max-body-bytes", type=_count, default=32 << 20, help="of bodies that are rewritten")
    add("--connect-timeout", type=positive_duration_flag_s, default=5.0)
    add(
        "--prefill-timeout",
        type=positive_duration_flag_s,
        default=60.0,
        help="all prefill attempts of a request",
    )
    add("--idle-timeout", type=positive_duration_flag_s, default=1800.0, help="no byte moved")
    add(
        "--head-timeout",
        type=positive_duration_flag_s,
        default=30.0,
        help="for a request's head to arrive",
    )
    add(
        "--body-timeout",
        type=positive_duration_flag_s,
        default=120.0,
        help="to receive a body that is rewritten",
    )
    add("--upstream-keepalive", type=positive_duration_flag_s, default=3.0, help="below the engine's own")
    add("--max-idle-conns-per-host", type=_count, default=1024, help="kept open to an engine between calls")
    add("--drain-timeout", type=positive_duration_flag_s, default=60.0, help="for open streams after SIGTERM")


def _add_tls(parser: _Parser) -> None:
    add = parser.add_argument
    _flag(parser, "--secure-proxy", True, "TLS on the serving port; self-signed without --cert-path")
    add("--cert-path", type=Path, default=None, help="directory of tls.crt and tls.key, reloaded on change")
    add(
        "--enable-tls",
        action="extend",
        type=_legs,
        default=[],
        help="TLS to: prefiller, decoder (the own engine), or both",
    )
    add(
        "--tls-insecure-skip-verify",
        type=_legs,
        default=(),
        help="do not verify: prefiller, decoder, or both",
    )


def _yaml_flags(first: argparse.Namespace, parser: _Parser) -> list[str]:
    """The YAML as flags."""
    if first.configuration and first.configuration_file:
        raise ConfigError("--configuration and --configuration-file exclude each other")
    flag, text = "--configuration", first.configuration or ""
    try:
        if first.configuration_file:
            flag = "--configuration-file"
            text = read_text(first.configuration_file, max_bytes=MAX_YAML_BYTES)
        document = load_yaml(text, max_bytes=MAX_YAML_BYTES)
    except (YamlTextError, OSError) as error:
        raise ConfigError(f"{flag}: {error}") from error
    if document is None:
        return []
    if not isinstance(document, dict):
        raise ConfigError(f"{flag}: must be a mapping of flag names to values")
    known = {option for action in parser._actions for option in action.option_strings}
    flags = []
    for name, value in document.items():
        if f"--{name}" not in known and not str(name).startswith(tuple(_UNSUPPORTED_PREFIXES)):
            raise ConfigError(f"{flag}: unknown field {name!r}")
        if name in _CONFIGURATION or name == "help":
            raise ConfigError(f"{flag}: {name} cannot stand inside")
        flags.append(f"--{name}={_yaml_value(flag, str(name), value)}")
    return flags


def _yaml_value(flag: str, name: str, value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{flag}: {name} must be a text, a number, true or false, or a list of texts")


def _flag(parser: _Parser, name: str, default: bool | str, text: str) -> None:
    parser.add_argument(name, nargs="?", const=True, default=default, type=_boolean, help=text)


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _BOOLEANS[text.lower()]


def _legs(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if wrong := [name for name in names if name not in LEGS]:
        why = "encoder disaggregation is not supported" if wrong[0] == "encoder" else "unknown"
        raise argparse.ArgumentTypeError(f"{wrong[0]!r}: {why}, use {' or '.join(LEGS)}")
    return names


def _log_level(text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_LOG_LEVELS)}")
    return _LOG_LEVELS[text.lower()]


def _integer(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in {low}..{high}")
    return int(text)


def _port(text: str) -> int:
    return _integer(text, 1, MAX_PORT)


def _port0(text: str) -> int:
    return _integer(text, 0, MAX_PORT)


def _count(text: str) -> int:
    return _integer(text, 1, 1 << 40)


def _count0(text: str) -> int:
    return _integer(text, 0, 100)
