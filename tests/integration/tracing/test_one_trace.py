"""One trace from the picker through a real sidecar to the engine, at a real OTLP/HTTP receiver."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from epp.core.errors import PickerError
from epp.core.types import Outcome
from sidecar.tracing.exporter import SpanExporter
from sidecar.tracing.settings import read_settings
from sidecar.tracing.spans import read_traceparent
from tests.integration.sidecar.doubles import RecordingEngine, recording_engine
from tests.integration.sidecar.rig import COMPLETIONS, own_host, proxied, row
from tests.unit.director.rig import BASE, Rig

MARK = "zanzibar-secret"
BODY = {"model": BASE, "prompt": f"{MARK} the cat sat on the mat", "cache_salt": MARK}
REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


@dataclass
class Receiver:
    """What a collector was told."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    status: int = 200
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [
            span | {"service": resource["resource"]["attributes"][0]["value"]["stringValue"]}
            for body in self.bodies
            for resource in json.loads(body)["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    async def until(self, count: int) -> dict[str, dict[str, Any]]:
        """By name, once `count` spans are here."""
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.spans) >= count)
        assert len(self.spans) == count
        return {span["name"]: span for span in self.spans}

    async def take(self, request: web.Request) -> web.Response:
        assert request.path == "/v1/traces"
        assert request.content_type == "application/json"
        self.authorizations.add(request.headers.get("authorization"))
        self.bodies.append(await request.read())
        async with self.arrived:
            self.arrived.notify_all()
        return web.json_response({}, status=self.status)


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    app = web.Application()
    app.router.add_post("/{path:.*}", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield found
    finally:
        await runner.cleanup()


@asynccontextmanager
async def traced_picker(collector: Receiver, **env: str) -> AsyncIterator[Rig]:
    """A director whose spans go to the collector."""
    settings = read_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **env}, "kvpull-epp")
    exporter = SpanExporter(settings, interval_s=0.01)
    sending = asyncio.create_task(exporter.run())
    rig = Rig()
    rig.director._tracer = exporter.tracer()
    try:
        yield rig
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}


def context_at(engine: RecordingEngine) -> list[str | None]:
    """The traceparent of each request the engine got."""
    return [
        next((value for name, value in got.headers if name.lower() == "traceparent"), None)
        for got in engine.received
    ]


@pytest.fixture(autouse=True)
def collector_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own settings."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


async def test_from_the_picker_through_the_sidecar_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiver() as collector:
        env = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20abc"}
        async with traced_picker(collector, **env) as picker:
            routing = await picker.route(BODY, headers=(("traceparent", REMOTE + "1"),))
            headers = dict(routing.set_headers)
            async with traced_sidecar(tmp_path, collector, monkeypatch) as (engine, rig):
                assert (await rig.post(COMPLETIONS, BODY, **headers)).status == 200
            served = "10.0.0.1:8000"
            outcome = Outcome(200, served, 7, 3, 0, ttft_s=0.25, completed=True)
            picker.director.finished(routing.token, outcome)
            spans = await collector.until(6)
    names = ["gateway.request", "gateway.request_orchestration", "score_tokens", "run_scheduler_profile"]
    assert sorted(spans) == sorted([*names, "llm_d.pd_proxy.request", "llm_d.pd_proxy.engine"])
    request, decision = spans["gateway.request"], spans["gateway.request_orchestration"]
    sidecar, leg = spans["llm_d.pd_proxy.request"], spans["llm_d.pd_proxy.engine"]
    assert {span["traceId"] for span in spans.values()} == {REMOTE.split("-")[1]}
    assert request["parentSpanId"] == REMOTE.split("-")[2]
    assert decision["parentSpanId"] == sidecar["parentSpanId"] == request["spanId"]
    assert spans["score_tokens"]["parentSpanId"] == decision["spanId"]
    assert leg["parentSpanId"] == sidecar["spanId"]
    at_engine = read_traceparent(context_at(engine)[0])
    assert at_engine is not None
    assert (at_engine.trace_id, at_engine.span_id) == (leg["traceId"], leg["spanId"])
    assert {span["service"] for span in spans.values()} == {"kvpull-epp", "kvpull-sidecar"}
    assert attributes(request)["llm_d.served_by"] == served
    assert attributes(decision)["kvpull.decision_id"] == headers["x-kvpull-decision-id"]
    assert int(attributes(spans["score_tokens"])["llm_d.prompt_tokens"]) > 5
    assert collector.authorizations == {None, "Bearer abc"}
    assert MARK.encode() not in b"".join(collector.bodies)


@asynccontextmanager
async def traced_sidecar(
    tmp_path: Path, collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    monkeypatch.setattr("sidecar.tracing.exporter.INTERVAL_S", 0.01)
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    async with proxied(tmp_path, flags_env=env, tracing=True) as found:
        yield found


@pytest.mark.parametrize("traceparent", [None, REMOTE + "0"])
async def test_a_trace_that_is_not_sampled_has_no_span_and_no_second_decision(
    traceparent: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiver() as collector:
        async with traced_picker(collector, OTEL_TRACES_SAMPLER="always_off") as picker:
            given = () if traceparent is None else (("traceparent", traceparent),)
            routing = await picker.route(BODY, headers=given)
            async with traced_sidecar(tmp_path, collector, monkeypatch) as (engine, rig):
                assert (await rig.post(COMPLETIONS, BODY, **dict(routing.set_headers))).status == 200
            picker.director.finished(routing.token, Outcome())
        assert collector.bodies == []
    passed = context_at(engine)[0]
    assert passed == routing.set_headers["traceparent"]
    assert passed is not None
    assert passed.endswith("-00")


async def test_refusals_and_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiver() as collector:
        async with traced_picker(collector) as picker:
            with pytest.raises(PickerError):
                await picker.route({}, body=b"{")
            spans = await collector.until(2)
        assert {span["status"]["message"] for span in spans.values()} == {"bad-request"}


async def test_off_nothing_is_added_and_context_passes(tmp_path: Path) -> None:
    routing = await Rig().route(BODY, headers=(("traceparent", REMOTE + "1"),))
    assert "traceparent" not in routing.set_headers
    async with proxied(tmp_path) as (engine, rig):
        await rig.post(COMPLETIONS, BODY, traceparent=REMOTE + "1")
        await rig.post(COMPLETIONS, BODY)
    assert context_at(engine) == [REMOTE + "1", None]


async def test_both_legs_of_a_split_request_belong_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiver() as collector, recording_engine(own_host()) as peer:
        pool = [row(peer.host, peer.port)]
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        monkeypatch.setattr("sidecar.tracing.exporter.INTERVAL_S", 0.01)
        async with proxied(tmp_path, flags_env=env, tracing=True, pool=pool) as (_, rig):
            await rig.post(COMPLETIONS, {"prompt": "p"}, x_prefiller_host_port=f"{peer.host}:{peer.port}")
        spans = await collector.until(3)
    root = spans["llm_d.pd_proxy.request"]
    legs = [spans["llm_d.pd_proxy.prefill"], spans["llm_d.pd_proxy.decode"]]
    assert [leg["parentSpanId"] for leg in legs] == [root["spanId"]] * 2
    assert attributes(legs[0])["server.address"] == f"{peer.host}:{peer.port}"
    assert attributes(root)["kvpull.plan"] == "PrefillDecode"


async def test_a_collector_that_fails_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiver() as collector:
        collector.status = 503
        settings = read_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}, "s")
        exporter = SpanExporter(settings, interval_s=0.01)
        monkeypatch.setattr("sidecar.tracing.exporter.MAX_QUEUED", 10)
        tracer = exporter.tracer()
        for _ in range(25):
            tracer.receive(None, "x").end()  # type: ignore[union-attr]
        assert exporter.dropped == 15
        sending = asyncio.create_task(exporter.run())
        async with asyncio.timeout(60), collector.arrived:
            await collector.arrived.wait_for(lambda: bool(collector.bodies))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert (exporter.sent, exporter.dropped) == (0, 25)
