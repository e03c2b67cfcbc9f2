"""Ways in which gateways differ: clusters, HTTP/2 clients, fallback lists, subsets, renamed models.

All through a real Envoy 1.40.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os

import aiohttp
import pytest

from epp.extproc import wire
from tests.integration.extproc.conftest import Gateway
from tests.integration.extproc.envoy import SUBSET_HEADER
from tests.integration.extproc.test_envoy import TIMEOUT, ask
from tests.integration.extproc.upstream import ANSWER, EVENTS

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTERS = ("duplex", "override")
SIZES = (0, 1, 62_000, 62_001, 300_000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("via", ["override", "h2"])
async def test_bodies_arrive_whole_whatever_the_cluster_and_the_client(
    gateway: Gateway, via: str, size: int
) -> None:
    data = os.urandom(size)
    status, headers, body = await ask(gateway, via=via, data=data, x_pick="b")
    assert (status, headers["x-upstream"], body) == (200, "b", ANSWER)
    assert gateway.upstreams["b"].bodies == [data]
    assert gateway.handler.bodies == [data or None]


async def test_s_a09_a_stream_over_http2_is_neither_cut_nor_held(gateway: Gateway) -> None:
    upstream, handler = gateway.upstreams["a"], gateway.handler
    upstream.hold = asyncio.Event()
    received = b""
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(gateway.urls["h2"] + "/stream", data=b"{}") as answer,
    ):
        while received != b"".join(EVENTS[:2]):
            received += await answer.content.readany()
        upstream.hold.set()
        received += await answer.content.read()
    assert received == b"".join(EVENTS)
    await handler.until(lambda: len(handler.outcomes) == 1)
    assert handler.outcomes[0].completed


async def test_an_http2_client_that_resets_its_stream_ends_its_request(gateway: Gateway) -> None:
    upstream, handler = gateway.upstreams["a"], gateway.handler
    upstream.hold = asyncio.Event()
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        answer = await session.post(gateway.urls["h2"] + "/stream", data=b"{}")
        await answer.content.readexactly(len(EVENTS[0]))
        answer.close()
    await handler.until(lambda: len(handler.outcomes) == 1)
    assert not handler.outcomes[0].completed
    upstream.hold.set()


async def test_a_list_goes_to_its_first_host_and_then_to_the_next(gateway: Gateway) -> None:
    """S-D13: the first endpoint refuses connections, the gateway retries, and we hear who served."""
    status, headers, body = await ask(gateway, via="override", data=b"{}", x_pick="b+a")
    assert (status, headers["x-upstream"], body) == (200, "b", ANSWER)
    status, headers, body = await ask(gateway, via="override", data=b"{}", x_pick="closed+b+a")
    assert (status, headers["x-upstream"], body) == (200, "b", ANSWER)
    handler = gateway.handler
    await handler.until(lambda: len(handler.outcomes) == 2)
    served = gateway.upstreams["b"].address
    assert [outcome.served_by for outcome in handler.outcomes] == [served, served]
    assert gateway.upstreams["a"].bodies == []


async def test_a_list_means_nothing_to_an_original_dst_cluster(gateway: Gateway) -> None:
    """Why fallbacks are off unless asked for."""
    status, _, _ = await ask(gateway, data=b"{}", x_pick="b+a")
    assert status == 503


@pytest.mark.parametrize("via", CLUSTERS)
async def test_the_subset_hint_reaches_the_decision(gateway: Gateway, via: str) -> None:
    for data in (None, b"{}"):
        status, _, _ = await ask(gateway, via=via, data=data, **{SUBSET_HEADER: "10.0.0.1:1, 10.0.0.2"})
        assert status == 200
    assert [head.subset for head in gateway.handler.heads] == [{"10.0.0.1:1", "10.0.0.2"}] * 2


async def test_an_empty_subset_is_503(gateway: Gateway) -> None:
    status, headers, _ = await ask(gateway, data=b"{}", **{SUBSET_HEADER: " , "})
    assert (status, headers[wire.DROPPED_REASON]) == (503, wire.REASON_NO_ENDPOINTS)
    assert gateway.handler.heads == []


@pytest.mark.parametrize("via", ["duplex", "h2", "override", "buffered"])
@pytest.mark.parametrize("path", ["/named", "/stream", "/compressed"])
async def test_a_renamed_model_is_renamed_back_on_the_way(gateway: Gateway, via: str, path: str) -> None:
    wanted = '"' + "a longer name than before" * 10
    gateway.handler.rename_model = ("m", wanted)
    gateway.handler.new_body = b'{"model":"m"}'
    status, headers, body = await ask(gateway, path=path, via=via, data=b'{"model":"other"}')
    assert status == 200
    assert gateway.upstreams["a"].bodies == [b'{"model":"m"}']
    if path != "/stream":
        text = gzip.decompress(body) if path == "/compressed" else body
        assert json.loads(text) == {"id": "1", "model": wanted}
        assert int(headers.get("content-length", len(body))) == len(body)
    else:
        assert body == b"".join(EVENTS)


async def test_a_streamed_mode_gateway_gets_whole_names_back(gateway: Gateway) -> None:
    """What would have to be held could not be sent later, so only names that one message has are changed."""
    gateway.handler.rename_model = ("m", "wanted")
    handler = gateway.handler
    status, _, body = await ask(gateway, path="/named", via="streamed", data=None, method="GET")
    assert status == 200
    assert json.loads(body) == {"id": "1", "model": "wanted"}
    await handler.until(lambda: len(handler.outcomes) == 1)


# ---- doubles of the conformance tests ------------------------------------------------------------


async def test_conformance_requests_go_to_the_endpoints_they_name_only(gateway: Gateway) -> None:
    """GatewayFollowingEPPRouting, ...WithDataParallelism: the names reach the decision as a subset."""
    gateway.conform()
    chosen = gateway.upstreams["b"].address
    await ask(gateway, data=b"{}", x_pick="b", test_epp_endpoint_selection=chosen)
    await ask(gateway, data=b"{}", x_pick="b", test_epp_endpoint_selection="127.0.0.1, 10.0.0.7:3001")
    assert [head.subset for head in gateway.handler.heads] == [{chosen}, {"127.0.0.1", "10.0.0.7:3001"}]


@pytest.mark.parametrize("via", ["duplex", "override", "h2"])
async def test_conformance_answers_say_who_served(gateway: Gateway, via: str) -> None:
    """GatewayDestinationEndpointServed."""
    gateway.conform()
    for pick in ("a", "b"):
        _, headers, _ = await ask(gateway, via=via, data=b"{}", x_pick=pick)
        assert headers[wire.TEST_SERVED] == gateway.upstreams[pick].address


async def test_without_being_asked_for_the_doubles_do_nothing(gateway: Gateway) -> None:
    chosen = gateway.upstreams["a"].address
    _, headers, _ = await ask(gateway, data=b"{}", x_pick="b", test_epp_endpoint_selection=chosen)
    assert headers["x-upstream"] == "b"
    assert wire.TEST_SERVED not in headers
    assert gateway.handler.heads[0].subset is None
