"""Settings of the sidecar, checked as a whole before start; the flags and their forms are `flags`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sidecar.endpoint import MAX_PORT, EndpointError, canonical_host
from sidecar.flags import ConfigError, parse_flags
from sidecar.plan import Connector
from sidecar.routing_auth import load_routing_key
from sidecar.tracing.settings import TracingSettings, read_settings

_MAX_RANKS: Final = 64
_POOL: Final = re.compile(r"([a-z0-9-]{1,63}/)?[a-z0-9.-]{1,253}")
_HTTP_1: Final = frozenset({"", "http", "https"})
ANY_HOST: Final = ("0.0.0.0", "::")  # listen on every address


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
    bootstrap_port: int  # sglang and mooncake
    enforce_allow_list: bool
    endpoints_file: Path | None
    inference_pool: str | None  # `namespace/name`, or `name` in the own namespace
    pool_group: str
    routing_key: bytes | None  # None: routing headers are not signed
    sample_prefiller: bool
    prefill_max_retries: int
    prefill_retry_backoff_s: float
    prefill_failure_local: bool  # True: serve with the own engine alone; False: the prefill's error
    max_body_bytes: int  # of bodies that have to be held in memory
    connect_timeout_s: float
    prefill_timeout_s: float  # all prefill attempts of a request together
    idle_timeout_s: float  # no byte moved in either direction of a leg
    head_timeout_s: float  # a request's head
    body_timeout_s: float  # the client's whole body, where it has to be held
    max_idle_per_host: int
    upstream_keepalive_s: float  # below the engine's own (uvicorn: 5 s)
    drain_timeout_s: float
    secure: bool  # TLS on the serving port
    cert_path: Path | None  # None: self-signed
    tls_legs: frozenset[str]  # of `prefiller` and `decoder`: where calls go out over TLS
    unverified_legs: frozenset[str]  # of the same: whose certificate is not verified
    app_protocol: str
    log_level: str
    tracing: TracingSettings | None  # None: off
    metrics_port: int  # 0: off
    metrics_cert_dir: Path | None  # None: plain HTTP
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
    """Settings from flags, YAML and environment variables (`flags`).

    Raises:
        ConfigError: an unknown or unsupported flag, a bad value, or settings that exclude each other.
        SystemExit: `--help`.
    """
    try:
        config = _build(parse_flags(argv, env), env)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    _check(config)
    return config


def _build(args: argparse.Namespace, env: Mapping[str, str]) -> SidecarConfig:
    if args.kv_connector not in tuple(Connector):
        names = ", ".join(Connector)
        raise ConfigError(f"--kv-connector: {args.kv_connector!r} is not supported, use one of {names}")
    key = load_routing_key(args.routing_key_file.read_bytes()) if args.routing_key_file else None
    listen_host = args.listen_host
    if listen_host not in ANY_HOST:
        listen_host = _host("--listen-host", listen_host)
    # an sglang decode server cannot compute a prompt
    policy = args.prefill_failure_policy or ("error" if args.kv_connector == "sglang" else "local")
    mooncake_port = args.mooncake_bootstrap_port
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
        bootstrap_port=mooncake_port if args.kv_connector == "mooncake" else args.sglang_bootstrap_port,
        enforce_allow_list=args.enable_ssrf_protection,
        endpoints_file=args.endpoints_file,
        inference_pool=args.inference_pool or None,
        pool_group=args.pool_group,
        routing_key=key,
        sample_prefiller=args.enable_prefiller_sampling,
        prefill_max_retries=args.prefill_max_retries,
        prefill_retry_backoff_s=args.prefill_retry_backoff,
        prefill_failure_local=policy == "local",
        max_body_bytes=args.max_body_bytes,
        connect_timeout_s=args.connect_timeout,
        prefill_timeout_s=args.prefill_timeout,
        idle_timeout_s=args.idle_timeout,
        head_timeout_s=args.head_timeout,
        body_timeout_s=args.body_timeout,
        max_idle_per_host=args.max_idle_conns_per_host,
        upstream_keepalive_s=args.upstream_keepalive,
        drain_timeout_s=args.drain_timeout,
        secure=args.secure_proxy,
        cert_path=args.cert_path,
        tls_legs=frozenset(args.enable_tls),
        unverified_legs=frozenset(args.tls_insecure_skip_verify),
        app_protocol=args.app_protocol,
        log_level=args.zap_log_level,
        tracing=read_settings(env, "kvpull-sidecar") if args.tracing else None,
        metrics_port=args.metrics_port,
        metrics_cert_dir=args.metrics_cert_dir,
        ready_fd=args.ready_fd,
    )


def _check(config: SidecarConfig) -> None:
    """Refuse settings that exclude each other."""
    if config.enable_p2p_pull and config.connector is not Connector.NIXLV2:
        raise ConfigError(
            "--enable-p2p-pull is for --kv-connector nixlv2; the offloading connector always can pull"
        )
    _check_members(config)
    if config.app_protocol.lower() not in _HTTP_1:
        raise ConfigError(
            f"--app-protocol: {config.app_protocol!r}: this sidecar speaks HTTP/1.1 only; give the pool "
            "appProtocol http (an h2c pool makes the gateway speak HTTP/2 to the sidecar)"
        )
    if config.cert_path is not None and not config.secure:
        raise ConfigError("--cert-path needs --secure-proxy")
    if config.metrics_cert_dir is not None and not config.metrics_port:
        raise ConfigError("--metrics-cert-dir needs --metrics-port")
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


def _check_members(config: SidecarConfig) -> None:
    """The allow-list has one input, or is not asked for."""
    if config.endpoints_file is not None and config.inference_pool is not None:
        raise ConfigError("--endpoints-file and --inference-pool exclude each other: give one of them")
    if config.inference_pool is not None and not _POOL.fullmatch(config.inference_pool):
        raise ConfigError("--inference-pool: expected namespace/name, or a name")
    if config.enforce_allow_list and config.endpoints_file is None and config.inference_pool is None:
        raise ConfigError(
            "--enable-ssrf-protection needs the pool's members: give --inference-pool, "
            "--endpoints-file, or --enable-ssrf-protection=false to follow any routing header"
        )


def _check_no_loop(config: SidecarConfig) -> None:
    """The engine's ports must not be the sidecar's own."""
    apart = abs(config.port - config.model_server_port) >= config.ranks
    own_hosts = {config.listen_host, config.pod_ip}
    if config.listen_host in ANY_HOST:
        own_hosts |= {"127.0.0.1", "::1"}
    if not apart and config.model_server_host in own_hosts:
        raise ConfigError("--model-server-port: the engine's ports overlap the sidecar's own (--port)")


def _host(flag: str, text: str) -> str:
    try:
        return canonical_host(text)
    except EndpointError as error:
        raise ConfigError(f"{flag}: {error}") from error
