"""The metrics and debug port over real HTTP: what is open, what needs the token, what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from engine_plugin.identity import EndpointId
from epp.core.speculation import SpeculationSettings
from epp.core.thresholds import EVERYWHERE, PullSettings, PullThresholds, Scope
from epp.core.types import Outcome
from epp.debug import build_debug_app
from epp.telemetry.metrics import PeerRefusals, PickerMetrics, PoolCollector
from epp.telemetry.pool_gauges import PoolGauges
from epp.thresholds.in_force import ThresholdState
from tests.unit.core.rows import info
from tests.unit.core.test_endpoint_picker import Pool

TOKEN = "s3cret"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def pool() -> Pool:
    pool = Pool()
    pool.hold("b")
    pool.metrics("a", waiting=0.0, info=info())
    pool.metrics("b", waiting=9.0, info=info(seed_fp="other"))
    return pool


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[TestClient]:  # type: ignore[type-arg]
    registry = CollectorRegistry()
    PickerMetrics(registry)
    refusals = PeerRefusals()
    refusals.update(EndpointId("a"), {("peer\nforged", "seed_fp"): 2.0})
    registry.register(PoolCollector(pool.picker, ThresholdState, refusals, clock=lambda: 0.0))
    registry.register(PoolGauges(pool.picker, "pool", clock=lambda: 0.0))
    app = build_debug_app(pool.picker, registry, ThresholdState, TOKEN, clock=lambda: 0.0)
    async with TestClient(TestServer(app)) as client:
        yield client


@pytest.mark.parametrize("path", ["endpoints", "thresholds", "decisions/r"])
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \udcff"}]
)
async def test_debug_pages_need_the_token(
    client: TestClient,  # type: ignore[type-arg]
    path: str,
    headers: dict[str, str],
) -> None:
    answer = await client.get(f"/debug/kvpull/{path}", headers=headers)
    assert answer.status == 401


async def test_a_decision_is_explained(client: TestClient, pool: Pool) -> None:  # type: ignore[type-arg]
    decision = pool.ask("r")
    pool.picker.release(decision.decision_id, Outcome(status=200, completed=True))
    body = await (await client.get("/debug/kvpull/decisions/r", headers=AUTH)).json()
    assert body["decision_id"] == decision.decision_id
    assert body["reason"] == decision.choice.reason.value
    held = {row["pod"]: row["servable_tokens"] for row in body["candidates"]}
    assert held == {"a": 0, "b": 3200, "c": 0}
    assert body["outcome"]["status"] == 200
    assert body["pull"] == {"state": "none"}
    (holder,) = body["inputs"]["holders"]
    assert (holder["pod"], holder["cpu_blocks"], body["inputs"]["holders_total"]) == ("b", 200, 1)
    assert holder["engine"]["instance"] == "i"
    assert "other" not in str(body), "what engines compare appears as one fingerprint"
    assert (await client.get("/debug/kvpull/decisions/never", headers=AUTH)).status == 404


async def test_endpoints_show_claims_and_mismatch(client: TestClient, pool: Pool) -> None:  # type: ignore[type-arg]
    pool.picker.update_refusals(EndpointId("a"), {("bbb", "seed_fp"): 1.0}, 0.0)
    rows = {r["pod"]: r for r in await (await client.get("/debug/kvpull/endpoints", headers=AUTH)).json()}
    assert (rows["b"]["state"], rows["b"]["blocks_cpu"], rows["a"]["blocks_cpu"]) == ("live", 200, 0)
    assert rows["b"]["incompatible_with"] == {"a/0": "seed_fp"}
    assert rows["c"]["verified"] is False
    assert (rows["a"]["refused_peers"], rows["b"]["refused_peers"]) == (["bbb"], [])
    assert (rows["b"]["block_size_tokens"], rows["b"]["differs_from_pool"]) == (16, False)
    assert (rows["b"]["unsupported"], rows["b"]["hashes_unlike"]) == ("", None)


async def test_metrics_are_open_and_name_the_mismatch(client: TestClient) -> None:  # type: ignore[type-arg]
    text = await (await client.get("/metrics")).text()
    assert 'kvpull_epp_endpoint_incompatible{endpoint="b/0",field="seed_fp",other="a/0"} 1.0' in text
    assert 'kvpull_epp_index_blocks{endpoint="b/0",tier="cpu"} 200.0' in text
    assert r'kvpull_epp_peer_refused_total{endpoint="a/0",peer="peer\nforged",reason="seed_fp"} 2.0' in text
    assert 'llm_d_epp_ready_endpoints{name="pool"} 3.0' in text
    assert 'kvpull_epp_endpoint_differs{endpoint="b/0",what="block_hashes"} 0.0' in text
    assert 'kvpull_epp_claim_state{endpoint="b/0",state="unsupported"} 0.0' in text
    assert "kvpull_epp_index_bytes 0.0" not in text


async def test_speculative_entries_are_counted() -> None:
    pool = Pool(speculation=SpeculationSettings())
    pool.hold("b", blocks=100)
    decision = pool.ask()
    registry = CollectorRegistry()
    registry.register(PoolCollector(pool.picker, ThresholdState, PeerRefusals(), clock=lambda: 0.0))
    app = build_debug_app(pool.picker, registry, ThresholdState, TOKEN)
    async with TestClient(TestServer(app)) as client:
        assert 'speculative_entries{endpoint="b/0"} 1.0' in await (await client.get("/metrics")).text()
        assert pool.ask("r2").destination == decision.destination
        answer = await client.get("/debug/kvpull/decisions/r2", headers=AUTH)
        rows = {row["pod"]: row for row in (await answer.json())["candidates"]}
        assert (rows["b"]["cached_tokens"], rows["b"]["expected_tokens"]) == (1600, 3200)
        for decision_id in ("d1", "d2"):
            pool.picker.release(decision_id)
        assert 'speculative_entries{endpoint="b/0"} 0.0' in await (await client.get("/metrics")).text()


async def test_without_a_token_there_are_no_debug_pages(pool: Pool) -> None:
    app = build_debug_app(pool.picker, CollectorRegistry(), ThresholdState, None)
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/debug/kvpull/endpoints", headers=AUTH)).status == 401


async def test_the_thresholds_page_says_what_is_in_force(pool: Pool) -> None:
    rules = {EVERYWHERE: PullSettings(min_cached_token_delta=64), Scope(role="prefill"): PullSettings(False)}
    thresholds = PullThresholds(rules, 4)
    pool.picker.sources.set_thresholds(thresholds)
    state = ThresholdState(thresholds, "z.yaml: spec.x: unknown field", ("w",), ("a.yaml",), "directory /t")
    app = build_debug_app(pool.picker, CollectorRegistry(), lambda: state, TOKEN)
    async with TestClient(TestServer(app)) as client:
        body = await (await client.get("/debug/kvpull/thresholds", headers=AUTH)).json()
    assert (body["generation"], body["minCachedTokenDelta"], body["active"]) == (4, 64, True)
    assert (body["rejected"], body["warnings"], body["documents"]) == (state.rejected, ["w"], ["a.yaml"])
    assert body["rules"] == [
        {"model": None, "role": None, "source_class": None, "set": {"minCachedTokenDelta": 64}},
        {"model": None, "role": "prefill", "source_class": None, "set": {"enabled": False}},
    ]
