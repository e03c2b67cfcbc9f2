"""What the composition root makes of the command line: settings of the parts, checked.

Must not build or start anything.
"""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path

from epp import key_files
from epp.core.errors import ConfigError
from epp.endpoints.scraper import MetricsPageSettings
from epp.extproc.server import ServerSettings
from epp.extproc.service import Limits
from epp.leases.choice import HaMode
from epp.plugins.data_layer import MetricsDataSourceParameters
from epp.plugins.metric_specs import NO_MORE_GAUGES, EngineGauges
from epp.replicas import ReplicaSettings
from epp.request.trusted_salt import TrustedSalt
from epp.siblings.client import ClientSettings, SiblingAddress
from epp.siblings.reader import ReadLimits
from epp.telemetry.ledger_file import LedgerFile
from sidecar.certificates import CertificateError
from sidecar.tls import client_context, server_context
from sidecar.tracing.exporter import SpanExporter
from sidecar.tracing.settings import TracingError, read_settings


def check_ready_fd(fd: int | None) -> None:
    """Raises ConfigError: it is not open."""
    try:
        if fd is not None:
            os.fstat(fd)
    except OSError as error:
        raise ConfigError(f"--ready-fd {fd}: {error.strerror}") from error


def server_settings(arguments: argparse.Namespace) -> ServerSettings:
    """Of the ext-proc server."""
    return ServerSettings(
        host=arguments.listen_host,
        port=arguments.grpc_port,
        health_host=arguments.listen_host,
        health_port=arguments.grpc_health_port,
        secure=arguments.secure_serving,
        cert_path=arguments.cert_path,
        lame_duck_s=min(arguments.lame_duck, arguments.drain_timeout),
        drain_timeout_s=arguments.drain_timeout,
        limits=Limits(
            max_body_bytes=arguments.max_body_bytes,
            heeds_subset=not arguments.disable_endpoint_subset_filter,
            needs_bodies=arguments.cache_salt_header is not None,
        ),
    )


def trusted_salt(arguments: argparse.Namespace) -> TrustedSalt | None:
    """None: cache salts are the clients' own. Raises ConfigError: a key that cannot be read."""
    header: str | None = arguments.cache_salt_header
    if header is None:
        return None
    return TrustedSalt(header, key_files.salt_key(arguments.salt_key_file))


def metrics_tls(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Of our own metrics port; None: plain HTTP.

    Raises:
        ConfigError: files that cannot be used, or an authority without a certificate of ours.
    """
    directory: Path | None = arguments.metrics_cert_dir
    authority: Path | None = arguments.metrics_client_ca_file
    if directory is None:
        if authority is not None:
            raise ConfigError("--metrics-client-ca-file needs --metrics-cert-dir")
        return None
    try:
        return server_context(directory, authority)
    except CertificateError as error:
        flags = "--metrics-cert-dir" if authority is None else "--metrics-cert-dir, --metrics-client-ca-file"
        raise ConfigError(f"{flags}: {error}") from error


def metrics_page(
    arguments: argparse.Namespace,
    source: MetricsDataSourceParameters | None = None,
    gauges: EngineGauges = NO_MORE_GAUGES,
) -> MetricsPageSettings:
    """Where engines have their metrics: what `metrics-data-source` sets wins over the flags.

    Raises:
        ConfigError: a path that is none, or certificates that cannot be read.
    """
    said = MetricsDataSourceParameters() if source is None else source
    given = said.model_fields_set
    path = said.path if "path" in given else arguments.model_server_metrics_path
    if not path.startswith("/"):
        raise ConfigError("path of the engines' metrics: expected one such as /metrics")
    scheme = said.scheme if "scheme" in given else arguments.model_server_metrics_scheme
    insecure: bool = arguments.model_server_metrics_https_insecure_skip_verify
    if "insecure_skip_verify" in given:
        insecure = said.insecure_skip_verify
    tls = None
    if scheme == "https":
        tls = client_context(verify=not insecure)
        _load_certificates(tls, said)
    interval_s = arguments.refresh_metrics_interval if said.interval is None else said.interval
    return MetricsPageSettings(path, tls, interval_s, said.port, gauges)


def _load_certificates(context: ssl.SSLContext, said: MetricsDataSourceParameters) -> None:
    try:
        if said.ca_cert_path is not None:
            context.load_verify_locations(said.ca_cert_path)
        if said.client_cert_path is not None:
            context.load_cert_chain(said.client_cert_path, said.client_key_path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"metrics-data-source: its certificates cannot be used: {error}") from error


def replica_settings(arguments: argparse.Namespace) -> ReplicaSettings:
    """Of the snapshots that replicas give each other."""
    name: str | None = arguments.sibling_server_name
    return ReplicaSettings(
        tls_path=arguments.sibling_tls_path,
        siblings=tuple(SiblingAddress(host, port, name or host) for host, port in arguments.sibling),
        host=arguments.listen_host,
        port=arguments.snapshot_port,
        client=ClientSettings(
            total_s=arguments.snapshot_timeout, limits=ReadLimits(arguments.snapshot_max_bytes)
        ),
    )


def ha_mode(arguments: argparse.Namespace) -> HaMode:
    """How replicas work together. Raises ConfigError: two answers, or a name that is none."""
    given = None if arguments.ha_mode is None else HaMode(arguments.ha_mode)
    if arguments.ha_enable_leader_election and given not in (None, HaMode.ACTIVE_PASSIVE):
        raise ConfigError(f"--ha-enable-leader-election means active-passive, --ha-mode says {given.value}")
    if arguments.ha_enable_leader_election:
        return HaMode.ACTIVE_PASSIVE
    return given or HaMode.NONE


def ledger_file(arguments: argparse.Namespace) -> LedgerFile | None:
    """None: not asked for. Raises ConfigError: its directory does not exist."""
    path: Path | None = arguments.ledger_file
    if path is None:
        return None
    if not path.parent.is_dir():
        raise ConfigError(f"--ledger-file {path}: its directory does not exist")
    return LedgerFile(path, max_bytes=arguments.ledger_max_bytes, keep=arguments.ledger_keep)


def span_exporter(arguments: argparse.Namespace) -> SpanExporter | None:
    """None: tracing is off. Raises ConfigError: an OTEL_* variable that cannot be followed."""
    if not arguments.tracing:
        return None
    try:
        return SpanExporter(read_settings(os.environ, "kvpull-epp"))
    except TracingError as error:
        raise ConfigError(f"--tracing: {error}") from error
