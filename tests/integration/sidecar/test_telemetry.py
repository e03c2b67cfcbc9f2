"""What the metrics say of pulls, legs and connections, and what of a trace is passed on."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sidecar import wire
from tests.integration.sidecar.doubles import Received, recording_engine, status
from tests.integration.sidecar.rig import COMPLETIONS, own_host, proxied, row, running

_TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "a=1,b=2",
    "baggage": "tenant=x",
}


async def _prefilled(request: web.Request, _: Received) -> web.StreamResponse:
    assert request.transport is not None
    host = request.transport.get_extra_info("sockname")[0]
    ids = {"do_remote_prefill": True, "remote_block_ids": [], "remote_engine_id": "e"}
    return web.json_response({"kv_transfer_params": {**ids, "remote_host": host, "remote_port": 1}})


@pytest.mark.parametrize("connector", ["offloading", "nixlv2"])
async def test_trace_context_reaches_both_legs(tmp_path: Path, connector: str) -> None:
    async with recording_engine(own_host(), _prefilled) as prefill, recording_engine(own_host()) as decode:
        pool = [row(prefill.host, prefill.port)]
        async with running(tmp_path, decode, pool=pool, connector=connector) as rig:

            async def after_prefill(request: web.Request, received: Received) -> web.StreamResponse:
                await prefill.wait_arrived()
                return web.Response(body=b"{}")

            decode.answer = after_prefill
            await rig.post(
                COMPLETIONS, {"prompt": "p"}, **_TRACE, **{wire.PREFILLER_HOST_PORT: prefill.address}
            )
    for leg in (prefill.last, decode.last):
        assert {name: leg.values(name) for name in _TRACE} == {name: [text] for name, text in _TRACE.items()}


async def test_connections_legs_and_retries_are_counted(tmp_path: Path) -> None:
    async with recording_engine(own_host(), status(503)) as prefill, recording_engine(own_host()) as decode:
        pool = [row(prefill.host, prefill.port)]
        flags = ("--prefill-max-retries=1", "--prefill-retry-backoff=1ms")
        async with running(tmp_path, decode, *flags, pool=pool, connector="nixlv2") as rig:
            await rig.post(COMPLETIONS, {"prompt": "p"}, **{wire.PREFILLER_HOST_PORT: prefill.address})
            await rig.post(COMPLETIONS, {"prompt": "p"})
            assert rig.value("upstream_connections_total", to="prefiller", event="opened") == 1
            assert rig.value("upstream_connections_total", to="prefiller", event="reused") == 1
            assert rig.value("upstream_connections_total", to="decoder", event="opened") == 1
            assert rig.value("upstream_connections_total", to="decoder", event="reused") == 1
            assert rig.value("client_connections") == 1
            assert rig.value("legs_total", leg="prefill", outcome="status_5xx") == 2
            assert rig.value("leg_seconds_count", leg="prefill") == 2
            assert rig.value("legs_total", leg="local", outcome="ok") == 1
            assert rig.value("retries_total", kind="prefill") == 1
            assert rig.value("suspected_total", part="prefiller") == 2


async def test_no_label_comes_from_a_client(tmp_path: Path) -> None:
    """Marks in path, headers and body never appear on the metrics page."""
    async with proxied(tmp_path, status(200), "--metrics-port", "8100") as (_, rig):
        marked = {"X-Mark": "mark-1", wire.KV_CACHE_SOURCE_HOST_PORT: "mark-2:80", wire.REQUEST_ID: "mark-3"}
        await rig.post("/mark-4", {"prompt": "mark-5"}, **marked)
        await rig.post(COMPLETIONS, {"prompt": "mark-5"}, **marked)
        async with aiohttp.ClientSession() as session, session.get(f"http://{rig.host}:8100/metrics") as page:
            text = await page.text()
    assert "kvpull_sidecar_requests_total" in text
    assert "mark-" not in text
