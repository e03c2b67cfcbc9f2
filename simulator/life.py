"""One request from the client's first byte to its last: routing, legs, end, and what the picker is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine_plugin.identity import EndpointId
from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import NoEndpoints
from epp.core.types import Outcome, PullReport, SchedulingDecision, SchedulingRequest
from epp.engine_model.profile import ModelProfile
from simulator.engine import SimulatedEngine
from simulator.orders import Orders
from simulator.prompts import Content
from simulator.requests import EngineRequest, Record
from simulator.timeline import Timeline


class Surroundings(Protocol):
    """What a request needs of its fleet."""

    timeline: Timeline
    profile: ModelProfile
    picker: EndpointPicker
    picker_back_s: float  # requests wait until then
    engines: dict[EndpointId, SimulatedEngine]
    decisions: list[str]
    orders: Orders

    def closed(self) -> None:
        """A request has ended."""


SESSION_HEADER = "x-session-id"


class RequestLife:
    """One request from the client's first byte to its last."""

    def __init__(
        self,
        fleet: Surroundings,
        record: Record,
        content: Content,
        timeout_s: float | None,
        then: Callable[[Record], None] | None,
    ) -> None:
        self.fleet, self.record, self.content = fleet, record, content
        self.then = then
        self.decision: SchedulingDecision | None = None
        self.leg: tuple[SimulatedEngine, EngineRequest] | None = None

    def route(self) -> None:
        if self.record.failed:
            return
        fleet, record = self.fleet, self.record
        if fleet.timeline.now_s < fleet.picker_back_s:  # the gateway holds it until a picker is there
            fleet.timeline.at(fleet.picker_back_s, self.route)
            return
        tokens = self.content.tokens[: record.prompt_tokens]
        headers = {SESSION_HEADER: record.session} if record.session else {}
        request = SchedulingRequest(record.request_id, fleet.profile.name, tokens, headers=headers)
        try:
            decision = fleet.picker.schedule(request, fleet.timeline.now_s, record.request_id)
        except NoEndpoints:
            self._close("no_endpoint")
            return
        self.decision = decision
        record.endpoint, record.computing = decision.destination.id.pod, decision.computing.pod
        record.reason = decision.choice.reason.value
        source = decision.kv_source.id if decision.kv_source else None
        record.source = source.pod if source else ""
        fleet.decisions.append(
            f"{record.request_id} {record.endpoint} {record.computing} {record.source or '-'}"
        )
        if decision.prefill is not None:
            self._send(decision.computing, source, 1, self._hand_over)
        else:
            self._send(decision.destination.id, source, record.output_tokens, self._finish)

    def _send(
        self,
        endpoint: EndpointId,
        source: EndpointId | None,
        output_tokens: int,
        on_end: Callable[[EngineRequest, bool], None],
        handed_over: bool = False,
    ) -> None:
        engine = self.fleet.engines[endpoint]
        request = EngineRequest(
            self.record,
            self.content,
            self.record.prompt_tokens,
            output_tokens,
            on_first_token=self._first_token if on_end == self._finish else ignore,
            on_end=on_end,
            on_pull_end=None if handed_over else self._pull_end,
            source=source.pod if source else None,
            handed_over=handed_over,
        )
        self.leg = (engine, request)
        if engine.alive:
            engine.submit(request)
        else:
            self._close("restart")

    def _hand_over(self, request: EngineRequest, complete: bool) -> None:
        """The prefill leg has ended: the decode leg fetches its blocks."""
        assert self.decision is not None
        if self.record.failed:
            return
        if not complete:
            self._close("restart")
            return
        destination = self.decision.destination.id
        self._send(destination, self.decision.computing, self.record.output_tokens, self._finish, True)

    def _first_token(self, request: EngineRequest) -> None:
        if not self.record.failed:
            self.record.first_token_s = self.fleet.timeline.now_s
            self.fleet.picker.first_token(self.record.request_id)

    def _pull_end(self, request: EngineRequest, reason: str, asked: int, received: int) -> None:
        decision = self.decision
        assert decision is not None
        source = decision.kv_source
        report = PullReport(
            decision_id=self.record.request_id,
            source=source.p2p_address if source else "",
            asked_tokens=asked,
            received_tokens=received,
            received_bytes=round(received * self.fleet.profile.kv_bytes_per_token),
            reason=reason,
            duration_ms=self.record.pull_s * 1e3,
        )
        self.fleet.picker.pull_finished(report, decision.computing)

    def _finish(self, request: EngineRequest, complete: bool) -> None:
        if not self.record.failed:
            self._close("" if complete else "restart")

    def give_up(self) -> None:
        """The client's own time limit."""
        if self.record.ended_s is None:
            self._close("timeout")

    def _close(self, failed: str) -> None:
        record, fleet = self.record, self.fleet
        record.failed, record.ended_s = failed, fleet.timeline.now_s
        fleet.closed()
        if failed and self.leg is not None:
            self.leg[0].abandon(self.leg[1])
        if self.decision is not None:
            fleet.picker.release(record.request_id, _outcome(record))
            fleet.orders.carry_out()
        if self.then is not None:
            self.then(record)


def ignore(_: EngineRequest) -> None:
    return None


def ignore_end(_: EngineRequest, _complete: bool) -> None:
    return None


def _outcome(record: Record) -> Outcome:
    if record.failed:
        return Outcome(ttft_s=record.ttft_s)
    cached = record.device_hit_tokens + record.restored_tokens + record.pulled_tokens
    return Outcome(
        status=200,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.output_tokens,
        cached_tokens=min(cached, record.prompt_tokens),
        ttft_s=record.ttft_s,
        completed=True,
    )
