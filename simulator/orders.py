"""What the picker orders ahead of a request, carried out in virtual time: pulls that nobody waits for."""

from __future__ import annotations

from array import array
from typing import Protocol

from engine_plugin.identity import EndpointId
from epp.core.endpoint_picker import EndpointPicker
from simulator.engine import SimulatedEngine
from simulator.prompts import Content
from simulator.pulls import Pulls
from simulator.requests import EngineRequest, Record
from simulator.timeline import Timeline


class Ordered(Protocol):
    """What orders need of their fleet."""

    timeline: Timeline
    picker: EndpointPicker
    engines: dict[EndpointId, SimulatedEngine]
    pulls: Pulls


class Orders:
    """Of one fleet. `moved_tokens` are those that came by order."""

    def __init__(self, fleet: Ordered) -> None:
        self._fleet = fleet
        self.count = 0
        self.moved_tokens = 0

    def carry_out(self) -> None:
        """Begin what the picker has ordered since the last call."""
        turns = self._fleet.picker.next_turns
        for ask in turns.take() if turns is not None else ():
            target, source = self._fleet.engines[ask.target], self._fleet.engines[ask.source]
            size = target.shape.block_tokens
            content = Content.of(array("I", ask.token_ids), size)
            names = content.names[: len(ask.token_ids) // size]
            held = len(target.cache.cpu.prefix(names))
            tokens = len(names) * size
            record = Record(ask.order_id, "order", self._fleet.timeline.now_s, tokens + 1, 0)
            request = EngineRequest(
                record,
                content,
                tokens + 1,
                0,
                lambda _: None,
                lambda _request, _complete: None,
                self._ended,
                source.name,
                ordered=True,
            )
            self.count += 1
            if held < len(names) and source.alive and target.alive:
                self._fleet.pulls.begin(source, target, request, held)
            else:
                self._ended(request, "local", 0, 0)

    def _ended(self, request: EngineRequest, reason: str, asked: int, received: int) -> None:
        turns = self._fleet.picker.next_turns
        self.moved_tokens += received
        if turns is not None:
            turns.finished(request.record.request_id)
