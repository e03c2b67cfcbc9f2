"""Settings of the sidecar: flags with the reference's names, checked as a whole before start.

Source of names and defaults: llm-d-router `pd-sidecar` at ebab687. What we do not do is refused by
name: a flag that is accepted and ignored would be a lie. Flags are Go style: `--x`, `--x=false`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from engine_plugin import wire as engine_wire
from sidecar.endpoint import MAX_PORT, EndpointError, canonical_host
from sidecar.plan import Connector
from sidecar.routing_auth import load_routing_key

_MAX_RANKS: Final = 64
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
ANY_HOST: Final = ("0.0.0.0", "::")  # listen on every address
# flags of the reference that would change behaviour in a way this sidecar does not implement
_UNSUPPORTED: Final = {
    "ec-connector": "encoder disaggregation",
    "decode-chunk-size": "chunked decode",
    "inference-pool": "the InferencePool watch (use --endpoints-file)",
    "pool-group": "the InferencePool watch (use --endpoints-file)",
    "cert-path": "TLS",
    "enable-tls": "TLS",
    "tls-insecure-skip-verify": "TLS",
    "configuration": "the YAML configuration",
    "configuration-file": "the YAML configuration",
    "mooncake-bootstrap-port": "the mooncake connector",
}


class ConfigError(ValueError):
    """The settings cannot be used; the message is one sentence that names the flag."""


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """Checked settings of one process."""

    listen_host: str  # where the serving port is bound
    port: int  # serving port of rank 0; rank r: + r
    model_server_host: str
    model_server_port: int  # HTTP port of the engine's rank 0; rank r: + r
    pod_ip: str | None  # own address as routing headers spell it
    ranks: int  # data-parallel ranks of this pod
    only_rank: int | None  # serve this rank alone (one process a rank); None: all of them
    connector: Connector
    enable_p2p_pull: bool  # nixlv2 only; the offloading connector can always pull
    p2p_base_port: int
    enforce_allow_list: bool
    endpoints_file: Path | None
    routing_key: bytes | None  # None: routing headers are not signed
    sample_prefiller: bool
    prefill_max_retries: int
    prefill_retry_backoff_s: float
    prefill_failure_local: bool  # True: serve with the own engine alone; False: the prefill's error
    max_body_bytes: int  # of bodies that have to be held in memory
    connect_timeout_s: float
    prefill_timeout_s: float  # all prefill attempts of a request together
    idle_timeout_s: float  # no byte moved in either direction of a leg
    body_timeout_s: float  # the client's whole body, where it has to be held
    upstream_keepalive_s: float  # below the engine's own (uvicorn: 5 s)
    drain_timeout_s: float
    metrics_port: int  # 0: off
    ready_fd: int | None

    def __repr__(self) -> str:
        """Without the key: this text may end up in a log."""
        return f"SidecarConfig({self.listen_host}:{self.port}, {self.connector}, {self.ranks} ranks)"

    @property
    def pull_enabled(self) -> bool:
        """Whether a source header can have an effect."""
        return self.connector is Connector.OFFLOADING or self.enable_p2p_pull

    @property
    def served_ranks(self) -> tuple[int, ...]:
        """Ranks this process listens for."""
        return tuple(range(self.ranks)) if self.only_rank is None else (self.only_rank,)


def parse_config(argv: Sequence[str], env: Mapping[str, str]) -> SidecarConfig:
    """Settings from flags and the reference's environment variables (`POD_IP`, `P2P_CONNECTOR_PORT`).

    Raises:
        ConfigError: an unknown or unsupported flag, a bad value, or settings that exclude each other.
        SystemExit: `--help`.
    """
    try:
        config = _build(_parser(env).parse_args(list(argv)))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    _check(config)
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="kvpull-sidecar", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--listen-host", default="0.0.0.0", help="address to bind (default: all)")
    add("--port", type=_port, default=8000, help="serving port of rank 0")
    add("--model-server-host", default="127.0.0.1", help="where the engine listens")
    add("--model-server-port", "--vllm-port", type=_port, default=8200, help="HTTP port of rank 0")
    add("--pod-ip", default=env.get("POD_IP"), help="own address in routing headers (POD_IP)")
    add("--data-parallel-size", type=_count, default=1, help="ranks of this pod")
    add("--rank", type=int, default=None, help="serve one rank only")
    add("--kv-connector", default=Connector.NIXLV2.value, help="offloading or nixlv2")
    _flag(parser, "--enable-p2p-pull", False, "pull prefix blocks with nixlv2")
    p2p_port = env.get("P2P_CONNECTOR_PORT", str(engine_wire.P2P_PORT))
    add("--p2p-connector-port", type=_port, default=p2p_port, help="P2P port of rank 0")
    _flag(parser, "--enable-ssrf-protection", True, "talk to members of the pool only")
    add("--endpoints-file", type=Path, default=None, help="static endpoint file: the allow-list")
    add("--routing-key-file", type=Path, default=None, help="key of x-kvpull-routing-auth")
    _flag(parser, "--enable-prefiller-sampling", False, "start anywhere in a prefiller list")
    add("--prefill-max-retries", type=_count0, default=0, help="more attempts of a failed prefill leg")
    add("--prefill-retry-backoff", type=_duration, default=0.2, help="pause before each")
    add("--prefill-failure-policy", choices=("local", "error"), default="local")
    add("--max-body-bytes", type=_count, default=32 << 20, help="of bodies that are rewritten")
    add("--connect-timeout", type=_duration, default=5.0)
    add("--prefill-timeout", type=_duration, default=60.0, help="all prefill attempts of a request")
    add("--idle-timeout", type=_duration, default=1800.0, help="no byte moved")
    add("--body-timeout", type=_duration, default=120.0, help="to receive a body that is rewritten")
    add("--upstream-keepalive", type=_duration, default=3.0, help="below the engine's own")
    add("--drain-timeout", type=_duration, default=60.0, help="for open streams after SIGTERM")
    add("--metrics-port", type=_port0, default=0, help="0: off")
    add("--ready-fd", type=int, default=None, help="write one JSON line there when serving")
    _flag(parser, "--secure-proxy", False, "TLS on the serving port (not supported yet)")
    for name in _UNSUPPORTED:
        add(f"--{name}", nargs="?", const="", default=None, help=argparse.SUPPRESS)
    return parser


def _build(args: argparse.Namespace) -> SidecarConfig:
    for name, what in _UNSUPPORTED.items():
        if getattr(args, name.replace("-", "_")) is not None:
            raise ConfigError(f"--{name}: {what} is not supported by this sidecar")
    if args.secure_proxy:
        raise ConfigError("--secure-proxy: TLS is not supported by this sidecar, give --secure-proxy=false")
    if args.kv_connector not in tuple(Connector):
        names = " or ".join(Connector)
        raise ConfigError(f"--kv-connector: {args.kv_connector!r} is not supported, use {names}")
    key = load_routing_key(args.routing_key_file.read_bytes()) if args.routing_key_file else None
    listen_host = args.listen_host
    if listen_host not in ANY_HOST:
        listen_host = _host("--listen-host", listen_host)
    pod_ip = args.pod_ip or (listen_host if listen_host not in ANY_HOST else None)
    return SidecarConfig(
        listen_host=listen_host,
        port=args.port,
        model_server_host=_host("--model-server-host", args.model_server_host),
        model_server_port=args.model_server_port,
        pod_ip=_host("--pod-ip", pod_ip) if pod_ip else None,
        ranks=args.data_parallel_size,
        only_rank=args.rank,
        connector=Connector(args.kv_connector),
        enable_p2p_pull=args.enable_p2p_pull,
        p2p_base_port=args.p2p_connector_port,
        enforce_allow_list=args.enable_ssrf_protection,
        endpoints_file=args.endpoints_file,
        routing_key=key,
        sample_prefiller=args.enable_prefiller_sampling,
        prefill_max_retries=args.prefill_max_retries,
        prefill_retry_backoff_s=args.prefill_retry_backoff,
        prefill_failure_local=args.prefill_failure_policy == "local",
        max_body_bytes=args.max_body_bytes,
        connect_timeout_s=args.connect_timeout,
        prefill_timeout_s=args.prefill_timeout,
        idle_timeout_s=args.idle_timeout,
        body_timeout_s=args.body_timeout,
        upstream_keepalive_s=args.upstream_keepalive,
        drain_timeout_s=args.drain_timeout,
        metrics_port=args.metrics_port,
        ready_fd=args.ready_fd,
    )


def _check(config: SidecarConfig) -> None:
    """Refuse settings that exclude each other."""
    if config.enable_p2p_pull and config.connector is not Connector.NIXLV2:
        raise ConfigError(
            "--enable-p2p-pull is for --kv-connector nixlv2; the offloading connector always can pull"
        )
    if config.enforce_allow_list and config.endpoints_file is None:
        raise ConfigError(
            "--enable-ssrf-protection needs the pool's members: give --endpoints-file, or "
            "--enable-ssrf-protection=false to follow any routing header"
        )
    if config.ranks > _MAX_RANKS:
        raise ConfigError(f"--data-parallel-size: {config.ranks} ranks, at most {_MAX_RANKS} a pod")
    if config.only_rank is not None and not 0 <= config.only_rank < config.ranks:
        raise ConfigError(f"--rank: {config.only_rank} is not one of {config.ranks} ranks")
    for name, base in (
        ("--port", config.port),
        ("--model-server-port", config.model_server_port),
        ("--p2p-connector-port", config.p2p_base_port),
    ):
        if base + config.ranks - 1 > MAX_PORT:
            raise ConfigError(f"{name}: {base} leaves no room for {config.ranks} ranks")
    if config.pod_ip is None and (config.pull_enabled or config.routing_key is not None):
        raise ConfigError(
            "--pod-ip (or POD_IP) is needed to recognise the own address in routing headers, "
            "unless --listen-host is one address"
        )
    _check_no_loop(config)


def _check_no_loop(config: SidecarConfig) -> None:
    """The engine's ports must not be the sidecar's own."""
    apart = abs(config.port - config.model_server_port) >= config.ranks
    own_hosts = {config.listen_host, config.pod_ip}
    if config.listen_host in ANY_HOST:
        own_hosts |= {"127.0.0.1", "::1"}
    if not apart and config.model_server_host in own_hosts:
        raise ConfigError("--model-server-port: the engine's ports overlap the sidecar's own (--port)")


def _flag(parser: argparse.ArgumentParser, name: str, default: bool, text: str) -> None:
    parser.add_argument(name, nargs="?", const=True, default=default, type=_boolean, help=text)


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


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


def _duration(text: str) -> float:
    """Seconds of `200ms`, `1m30s`, or a plain number of seconds; more than zero."""
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) == text and parts:
        seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    else:
        try:
            seconds = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 200ms or 30s") from None
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration above zero")
    return seconds


def _host(flag: str, text: str) -> str:
    try:
        return canonical_host(text)
    except EndpointError as error:
        raise ConfigError(f"{flag}: {error}") from error
