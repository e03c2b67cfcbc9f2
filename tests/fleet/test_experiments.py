"""The experimental policies on one fleet, each by its sample configuration: bytes that moved, tokens, the
record."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.client import CHAT, COMPLETIONS
from deploy.local.envoy import LAB_SUBSET_HEADER
from deploy.local.fleet import Fleet, running_fleet
from deploy.local.report import Reporter
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import Meter, Observation, Transfer, ask
from deploy.local.scenario.texts import Texts, chat, question
from deploy.local.scenario.world import World
from deploy.local.spec import ROOT
from deploy.local.waiting import until
from tests.fleet.small import LOAD_ANSWER_TOKENS, captured, kvpull, small_spec

_HELD = 2_304  # tokens of a document: more than minCachedTokenDelta
_OWNER = "engine-a"
_QUEUE = 4
_TURN_TOKENS = 2_000  # of an answer: a second or more, in which the owner gets other work
# of these engines (a fifth of the model's time), roughly: what matters is that a pull is far cheaper
_COSTS = {
    "mode": "cost",
    "marginMs": 0,
    "recompute": {"fixedMs": 5, "tokenUs": 100},
    "pull": {"floorMs": 6, "tokenUs": 1, "bytesPerToken": 2048},
}

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


@dataclass(slots=True)
class _Seen:
    """What one run of the fleet showed, by policy."""

    kv_bytes_per_token: int = 0
    asked: dict[str, Observation] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    explained: str = ""
    ordered: Transfer | None = None
    counts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Rig:
    fleet: Fleet
    world: World
    seen: _Seen

    @asynccontextmanager
    async def policy(self, name: str) -> AsyncIterator[list[dict[str, Any]]]:
        """The picker with one sample and empty caches; a document that only `_OWNER` holds."""
        for pod in self.fleet.spec.pods:
            await self.fleet.engine(pod).reset_cache(cpu_tier_too=True)
        await self.fleet.stop_picker()
        await self.fleet.start_picker(ROOT / "config" / "epp" / f"{name}.yaml")
        await self.fleet.wait_live(self.fleet.spec.pods)
        document = self.world.texts.document(name, _HELD)
        messages = [question(document, "What is this?")]
        await self.fleet.engine_client(_OWNER).stream(
            CHAT, chat(messages, max_tokens=1), request_id=f"own-{name}"
        )
        await self.world.until_known(_OWNER, _HELD)
        yield messages

    async def ask(self, request_id: str, messages: list[dict[str, Any]], **headers: str) -> None:
        self.seen.asked[request_id] = await ask(
            self.fleet, chat(messages, max_tokens=2), request_id, headers=headers
        )
        with captured() as text:
            assert await kvpull(self.fleet, "explain", request_id, "--json") == 0
        self.seen.records[request_id] = json.loads(text.getvalue())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> _Seen:
    """One fleet for all three; it has stopped when they look."""

    async def run() -> _Seen:
        spec = small_spec(tmp_path_factory.mktemp("experiments"), "127.0.47", 5200)
        found = _Seen(spec.kv_bytes_per_token)
        async with running_fleet(spec, lambda _: None) as fleet:
            world = World(fleet, Texts(fleet.spec.tokenizer), Reporter(), judge_ttft=False)
            rig = _Rig(fleet, world, found)
            await _second_copy(rig)
            await _next_turn(rig)
            await _predicted_ttft(rig)
        return found

    return asyncio.run(run())


async def _second_copy(rig: _Rig) -> None:
    async with rig.policy("second-copy") as messages:
        for n in range(5):
            await rig.ask(f"warm-{n}", messages)
        async with busy(rig.fleet, _OWNER, waiting=_QUEUE, answer_tokens=LOAD_ANSWER_TOKENS):
            await rig.ask("hot", messages)


async def _next_turn(rig: _Rig) -> None:
    fleet = rig.fleet
    async with rig.policy("next-turn") as messages:
        session = {"x-session-id": "conversation"}
        meter = Meter(fleet, fleet.spec.pods)
        await meter.start()
        body = chat(messages, max_tokens=_TURN_TOKENS)
        turn = asyncio.create_task(fleet.gateway.stream(CHAT, body, request_id="turn-1", headers=session))
        await _inflight(fleet, 1)
        there = {LAB_SUBSET_HEADER: fleet.engine_spec(_OWNER).address.serving}
        work = {"prompt": "Count.", "max_tokens": 3 * _TURN_TOKENS}
        other = asyncio.create_task(
            fleet.lab.stream(COMPLETIONS, work, request_id="other-work", headers=there)
        )
        await _inflight(fleet, 2)
        await turn
        await until("an order has ended", lambda: _orders(fleet), lambda found: sum(found.values()) > 0)
        rig.seen.counts = await _orders(fleet)
        rig.seen.ordered = await meter.stop()
        target = next(pod for pod, size in rig.seen.ordered.received.items() if size)
        await rig.world.until_known(target, _HELD)
        await rig.ask("turn-2", messages, **session)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


async def _predicted_ttft(rig: _Rig) -> None:
    thresholds = {
        "apiVersion": "kvpull/v1alpha1",
        "kind": "PullThresholds",
        "spec": {"default": {"cost": _COSTS}},
    }
    path = rig.fleet.spec.run_dir / "thresholds" / "zz-costs.yaml"
    path.write_text(yaml.safe_dump(thresholds))
    async with rig.policy("predicted-ttft") as messages:
        await rig.ask("idle", messages)
        async with busy(rig.fleet, _OWNER, waiting=_QUEUE, answer_tokens=LOAD_ANSWER_TOKENS):
            await rig.ask("queued", messages)
        with captured() as text:
            assert await kvpull(rig.fleet, "explain", "queued") == 0
        rig.seen.explained = text.getvalue()


async def _inflight(fleet: Fleet, count: int) -> None:
    await until(
        f"{count} requests are under way on {_OWNER}",
        fleet.picker.endpoints,
        lambda rows: rows[_OWNER].inflight == count,
    )


async def _orders(fleet: Fleet) -> dict[str, float]:
    """Ended orders by result."""
    url = f"http://127.0.0.1:{fleet.spec.addresses.control.metrics_port}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=30.0) as answer:
            return str(answer.read().decode())

    for family in text_string_to_metric_families(await asyncio.to_thread(read)):
        if family.name == "kvpull_epp_prefetch_orders":
            return {s.labels["result"]: s.value for s in family.samples if s.name.endswith("_total")}
    return {}


def _expect_pull(seen: _Seen, request_id: str) -> None:
    """From the owner, whole, counted alike at both ends."""
    found, size = seen.asked[request_id], _HELD * seen.kv_bytes_per_token
    assert (found.decision.source, found.computed.pulled_tokens) == (_OWNER, _HELD)
    assert found.decision.destination != _OWNER
    assert found.moved.received == {
        pod: size if pod == found.decision.destination else 0 for pod in found.moved.received
    }
    assert found.moved.served[_OWNER] == size


def test_a_hot_prefix_of_a_busy_owner_gets_a_second_holder(seen: _Seen) -> None:
    warm = [seen.asked[f"warm-{n}"] for n in range(5)]
    assert {found.decision.destination for found in warm} == {_OWNER}
    assert sum(found.moved.received_bytes for found in warm) == 0
    _expect_pull(seen, "hot")


def test_the_next_turn_is_restored_where_it_was_ordered_to(seen: _Seen) -> None:
    assert seen.counts == {"ok": 1.0}
    assert seen.ordered is not None
    size = _HELD * seen.kv_bytes_per_token
    assert (seen.ordered.received_bytes, seen.ordered.served[_OWNER]) == (size, size)
    target = next(pod for pod, received in seen.ordered.received.items() if received)
    turn = seen.asked["turn-2"]
    assert turn.decision.destination == target != _OWNER
    assert (turn.decision.source, turn.moved.received_bytes) == (None, 0)
    assert (turn.computed.restored_tokens, turn.computed.pulled_tokens) == (_HELD, 0)


def test_the_soonest_endpoint_wins_with_its_source(seen: _Seen) -> None:
    idle, queued = seen.records["idle"], seen.records["queued"]
    assert seen.asked["idle"].decision.destination == _OWNER
    assert seen.asked["idle"].moved.received_bytes == 0
    _expect_pull(seen, "queued")
    rows = {row["pod"]: row for row in queued["forecasts"]}
    assert set(rows) == {"engine-a", "engine-b", "engine-c"}
    winner = rows[queued["destination"]["pod"]]
    assert winner["ttft_ms"] == min(row["ttft_ms"] for row in rows.values())
    assert winner["source"] == f"{_OWNER}/0"
    assert rows[_OWNER]["busy_ms"] > 0.0
    assert {row["pod"] for row in idle["forecasts"]} == set(rows)
    assert f"foreseen on {queued['destination']['pod']}/0: first token after" in seen.explained
    assert f"pull from {_OWNER}/0" in seen.explained
