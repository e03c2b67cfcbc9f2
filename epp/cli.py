"""`kvpull`: the command line. One sub-command a task; each imports only what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from epp.core.byte_budget import DEFAULT_MAX_BYTES
from epp.core.errors import ConfigError
from epp.flag_values import (
    body_bytes,
    boolean,
    file_bytes,
    file_count,
    host_port,
    index_bytes,
    labels,
    lease_name,
    port,
    ports,
    salt_header,
    snapshot_bytes,
)
from epp.ops.commands import add_commands
from sidecar.durations import duration_flag_s
from simulator.commands import add_arguments as add_simulate_arguments


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="kvpull", description="Pull a busy peer's KV blocks instead of recomputing."
    )
    commands = top.add_subparsers(dest="command", required=True)
    _add_epp(commands.add_parser("epp", help="run the Endpoint Picker (Envoy ext-proc)"))
    add_commands(commands)
    add_simulate_arguments(
        commands.add_parser("simulate", help="would pulls pay: a configuration, a trace, modelled engines")
    )
    return top


def _add_epp(epp: argparse.ArgumentParser) -> None:
    config = epp.add_mutually_exclusive_group(required=True)
    config.add_argument("--config-file", type=Path, help="EndpointPickerConfig")
    config.add_argument("--config-text", metavar="YAML", help="the same, here and now; it cannot be reloaded")
    for add in (
        _add_inputs,
        _add_tokens,
        _add_serving,
        _add_secrets,
        _add_snapshots,
        _add_replicas,
        _add_engines,
        _add_records,
        _add_life,
    ):
        add(epp)
    epp.set_defaults(run=_serve)


def _add_tokens(epp: argparse.ArgumentParser) -> None:
    """Where prompts become tokens, unless the configuration says it."""
    epp.add_argument(
        "--tokenizer", type=Path, help="directory of the model's tokenizer.json and chat template"
    )
    epp.add_argument(
        "--tokenizer-budget",
        type=duration_flag_s,
        default=2.0,
        metavar="DURATION",
        help="longest a request waits for its tokens; then it is routed by load",
    )


def _add_serving(epp: argparse.ArgumentParser) -> None:
    """Ports, certificates, and what a request may be."""
    epp.add_argument("--listen-host", default="0.0.0.0", help="address of all ports")
    epp.add_argument("--grpc-port", type=port, default=9002)
    epp.add_argument("--grpc-health-port", type=port, default=9003)
    epp.add_argument("--metrics-port", type=port, default=9090)
    epp.add_argument(
        "--metrics-cert-dir", type=Path, help="TLS on the metrics port: directory of tls.crt and tls.key"
    )
    epp.add_argument(
        "--metrics-client-ca-file",
        type=Path,
        help="serve the metrics port only to clients with a certificate of this PEM authority",
    )
    epp.add_argument("--secure-serving", type=boolean, default=True, metavar="BOOL")
    epp.add_argument("--cert-path", type=Path, help="directory of tls.crt and tls.key; absent: self-signed")
    epp.add_argument("--max-body-bytes", type=body_bytes, default=32 << 20)
    epp.add_argument(
        "--conformance-headers",
        type=boolean,
        default=False,
        metavar="BOOL",
        help="for tests of gateways only: a request may name its endpoints (test-epp-endpoint-selection)",
    )
    epp.add_argument(
        "--allow-experimental-plugins",
        type=boolean,
        nargs="?",
        const=True,
        default=False,
        metavar="BOOL",
        help="accepted; not required",
    )


def _add_secrets(epp: argparse.ArgumentParser) -> None:
    """Files with keys and tokens."""
    epp.add_argument(
        "--debug-token-file", type=Path, help="bearer token of /debug/kvpull; absent: no debug routes"
    )
    epp.add_argument("--routing-key-file", type=Path, help="key that signs routing headers for the sidecars")
    epp.add_argument(
        "--peer-key-file", type=Path, help="the engines' pool key; only for kvpull-next-turn-prefetcher"
    )
    epp.add_argument("--index-seed-file", type=Path, help="32 hex digits; absent: a sibling's, else random")
    epp.add_argument(
        "--salt-key-file", type=Path, help="pool key, where engines publish cache salts as keyed digests"
    )
    epp.add_argument(
        "--cache-salt-header",
        type=salt_header,
        metavar="NAME",
        help="header in which the gateway names the tenant: it decides the cache salt, not the client",
    )


def _add_engines(epp: argparse.ArgumentParser) -> None:
    """Engines' metrics pages, and how long a pull may take."""
    epp.add_argument("--refresh-metrics-interval", type=duration_flag_s, default=0.05, metavar="DURATION")
    epp.add_argument("--model-server-metrics-path", default="/metrics", metavar="PATH", help="of engines")
    epp.add_argument("--model-server-metrics-scheme", choices=("http", "https"), default="http")
    epp.add_argument(
        "--model-server-metrics-https-insecure-skip-verify", type=boolean, default=False, metavar="BOOL"
    )
    epp.add_argument("--metrics-staleness-threshold", type=duration_flag_s, default=2.0, metavar="DURATION")
    epp.add_argument(
        "--pull-deadline",
        type=duration_flag_s,
        default=10.0,
        metavar="DURATION",
        help="longest that an engine lets a pull take; without a word of it a pull counts as "
        "outstanding for a second more",
    )


def _add_records(epp: argparse.ArgumentParser) -> None:
    """What is written of decisions and spans."""
    epp.add_argument("--ledger-file", type=Path, help="write every decision here, one JSON line each")
    epp.add_argument(
        "--ledger-max-bytes", type=file_bytes, default=64 << 20, metavar="BYTES", help="of one ledger file"
    )
    epp.add_argument(
        "--ledger-keep", type=file_count, default=4, metavar="FILES", help="ledger files, rotated by size"
    )
    epp.add_argument(
        "--tracing",
        type=boolean,
        default=False,
        metavar="BOOL",
        help="send spans by OTLP over HTTP, as the OTEL_* environment variables say",
    )


def _add_life(epp: argparse.ArgumentParser) -> None:
    """Start and stop."""
    epp.add_argument("--drain-timeout", type=duration_flag_s, default=30.0, metavar="DURATION")
    epp.add_argument(
        "--lame-duck",
        type=duration_flag_s,
        default=5.0,
        metavar="DURATION",
        help="unready but still accepting",
    )
    epp.add_argument("--log-level", default="info")
    epp.add_argument("--ready-fd", type=int, help="write one JSON line here when serving")


def _add_inputs(epp: argparse.ArgumentParser) -> None:
    """Where endpoints and thresholds come from: files, or a Kubernetes API server."""
    epp.add_argument(
        "--endpoints-file", type=Path, help="static endpoint file (overrides file-discovery's path)"
    )
    epp.add_argument(
        "--pool-name", help="InferencePool whose pods are the endpoints (unless a file gives them)"
    )
    epp.add_argument("--pool-namespace", help="of the pool and of what belongs to it; absent: the pod's own")
    epp.add_argument(
        "--objectives-group",
        default="llm-d.ai",
        help="API group of InferenceObjective and InferenceModelRewrite; empty: neither is watched",
    )
    epp.add_argument("--pool-group", default="inference.networking.k8s.io", help="API group of the pool")
    epp.add_argument(
        "--endpoint-selector",
        type=labels,
        metavar="LABELS",
        help="name=value,...: the pods that are endpoints, where there is no InferencePool",
    )
    epp.add_argument(
        "--disable-endpoint-subset-filter",
        type=boolean,
        nargs="?",
        const=True,
        default=False,
        metavar="BOOL",
        help="choose among all endpoints, whatever subset the gateway names",
    )
    epp.add_argument("--endpoint-target-ports", type=ports, metavar="PORTS", help="with --endpoint-selector")
    epp.add_argument("--thresholds-dir", type=Path, help="mounted directory of PullThresholds documents")
    epp.add_argument(
        "--thresholds-configmap",
        action="append",
        default=[],
        metavar="NAME",
        help="ConfigMap of PullThresholds documents, watched; it wins over the directory; repeatable",
    )
    epp.add_argument(
        "--thresholds-selector", type=labels, metavar="LABELS", help="watch the ConfigMaps with these labels"
    )


def _serve(arguments: argparse.Namespace) -> int:
    from epp.app import serve  # gRPC and protobuf take 0.4 s to import; --help need not

    return serve(arguments)


def _add_replicas(epp: argparse.ArgumentParser) -> None:
    """Several replicas: what they agree on by Leases (POD_NAME names this one)."""
    epp.add_argument(
        "--ha-mode",
        choices=["none", "active-active", "active-passive"],
        help="of several replicas: all serve and share the pull limits, or one does and the others wait",
    )
    epp.add_argument(
        "--ha-enable-leader-election",
        type=boolean,
        nargs="?",
        const=True,
        default=False,
        metavar="BOOL",
        help="the same as --ha-mode active-passive",
    )
    epp.add_argument("--ha-lease-name", type=lease_name, default="kvpull-epp", metavar="NAME")


def _add_snapshots(epp: argparse.ArgumentParser) -> None:
    """Index snapshots between replicas: off unless asked for."""
    epp.add_argument(
        "--snapshot-port", type=port, help="give snapshots of the index to siblings here; absent: to nobody"
    )
    epp.add_argument(
        "--sibling",
        type=host_port,
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="snapshot port of other replicas, asked at start (repeatable; a name may have many addresses)",
    )
    epp.add_argument(
        "--sibling-tls-path", type=Path, help="directory of tls.crt, tls.key and ca.crt, for both directions"
    )
    epp.add_argument(
        "--sibling-server-name", help="name in the siblings' certificates; absent: the host of --sibling"
    )
    epp.add_argument(
        "--snapshot-timeout",
        type=duration_flag_s,
        default=10.0,
        metavar="DURATION",
        help="longest the start waits for a snapshot",
    )
    epp.add_argument("--snapshot-max-bytes", type=snapshot_bytes, default=1 << 30)
    epp.add_argument(
        "--index-max-bytes",
        type=index_bytes,
        default=DEFAULT_MAX_BYTES,
        help="what the prefix index may take; a block is about 42 bytes an endpoint that holds it (compiled)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a clean stop, 2 for a configuration that must not start; of the other
    commands: docs/pulls.md."""
    arguments = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except ConfigError as error:
        print(f"kvpull: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
