"""A director over three endpoints with live, empty indexes and the shipped tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from engine_plugin.identity import EndpointId
from epp.core.events import BlockStored, EventBatch
from epp.core.flow.bands import FlowSettings
from epp.core.types import CacheTier, EngineBlockHash, SchedulingDecision, SchedulingRequest
from epp.director import Director
from epp.extproc.events import Headers, RequestHead, Routing
from epp.flow.admission import Admission, Open
from epp.flow.choice import build_admission
from epp.plugins.saturation import ConcurrencyDetector
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import parse_request
from epp.request.tokenise import LocalTokeniser
from epp.request.trusted_salt import TrustedSalt
from epp.request_terms import Objectives, RequestTerms
from epp.telemetry.metrics import PickerMetrics
from tests.unit.core.test_endpoint_picker import BLOCK, Pool

TOKENIZER_DIRECTORY = Path(__file__).resolve().parents[3] / "config" / "tokenizer"
BASE = "base-model"


class Rig:
    def __init__(
        self,
        tokenizer: LocalTokenizer | None = None,
        *,
        flow: FlowSettings | None = None,
        per_endpoint: int | None = None,
        objectives: Objectives | None = None,
        trusted_salt: TrustedSalt | None = None,
    ) -> None:
        """`per_endpoint`: requests that one may have; above it the pool is saturated."""
        self.pool = Pool()
        self.registry = CollectorRegistry()
        self.tokeniser = LocalTokeniser(tokenizer or LocalTokenizer.load(TOKENIZER_DIRECTORY), budget_s=30.0)
        self.admission = self._admission(flow, per_endpoint)
        self.director = Director(
            self.pool.picker,
            self.tokeniser,
            PickerMetrics(self.registry),
            admission=self.admission,
            terms=RequestTerms(objectives),
            trusted_salt=trusted_salt,
            clock=lambda: 0.0,
        )
        self.requests: list[SchedulingRequest] = []  # as the core saw them
        self._schedule, self.pool.picker.schedule = self.pool.picker.schedule, self._record  # type: ignore[method-assign]
        self._batches: dict[str, int] = {}
        for pod in "abc":
            self.serves(pod, BASE)

    def _admission(self, flow: FlowSettings | None, per_endpoint: int | None) -> Admission:
        if per_endpoint is None:
            return Open()
        detector, picker = ConcurrencyDetector("c", max_requests=per_endpoint), self.pool.picker

        def saturation(now_s: float, unbooked: int) -> float | None:
            return picker.saturation(detector, now_s, unbooked)

        return build_admission(flow, saturation, lambda: 0.0, lambda asking, outcome, waited_s: None)

    def serves(self, pod: str, model: str | None) -> None:
        """`pod`'s next metrics page names this model."""
        self.pool.metrics(pod, waiting=0.0, model_name=model)

    def _record(self, request: SchedulingRequest, now_s: float, decision_id: str) -> SchedulingDecision:
        self.requests.append(request)
        return self._schedule(request, now_s, decision_id)

    async def route(
        self,
        fields: dict[str, Any],
        path: str = "/v1/completions",
        *,
        body: bytes | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> Routing:
        head = RequestHead(
            Headers.of(("content-type", "application/json"), *headers), "POST", path, f"r{len(self.requests)}"
        )
        routing = self.director.decide(head, json.dumps(fields).encode() if body is None else body)
        return routing if isinstance(routing, Routing) else await routing

    async def cached_tokens(self, fields: dict[str, Any], path: str = "/v1/completions") -> dict[str, int]:
        """What the decision can know of who holds this request's prompt; holders only."""
        await self.route(fields, path)
        picker = self.pool.picker
        matches = picker.cache.match(self.requests[-1], [e.id for e in picker.endpoints])
        return {e.pod: match.cached_tokens for e, match in matches.items() if match.cached_tokens}

    async def hold(
        self, pod: str, fields: dict[str, Any], path: str = "/v1/completions", *, lora_name: str | None = None
    ) -> int:
        """`pod` says that it holds all whole blocks of this prompt; returns their tokens."""
        prompt = parse_request(json.dumps(fields).encode(), path, {}).prompt
        assert prompt is not None
        ids = await self.tokeniser.token_ids(prompt)
        assert ids is not None
        return self.hold_ids(pod, ids, lora_name=lora_name)

    def hold_ids(
        self,
        pod: str,
        ids: Sequence[int],
        *,
        lora_name: str | None = None,
        salt: str | None = None,
        tier: CacheTier = CacheTier.DEVICE,
    ) -> int:
        """`pod` says that it holds all whole blocks of these tokens; returns how many tokens those are."""
        blocks = len(ids) // BLOCK
        seq = self._batches[pod] = self._batches.get(pod, -1) + 1
        event = BlockStored(
            tier,
            tuple(EngineBlockHash(1000 * (seq + 1) + number) for number in range(blocks)),
            None,
            list(ids[: blocks * BLOCK]),
            BLOCK,
            lora_name=lora_name,
            extra_keys=_extra_keys(lora_name, salt, blocks),
            has_extra_keys=True,
        )
        self.pool.picker.cache.on_batch(EndpointId(pod), seq, EventBatch((event,)), 0.0)
        return blocks * BLOCK

    def metrics_page(self) -> str:
        return generate_latest(self.registry).decode()

    def value(self, sample: str) -> float:
        """A sample as it is written on the page; of the labels it does not name, the sum. 0.0: absent."""
        name, _, labels = sample.partition("{")
        wanted = {
            key: text.strip('"') for key, _, text in (p.partition("=") for p in labels[:-1].split(",") if p)
        }
        return sum(
            found.value
            for family in self.registry.collect()
            for found in family.samples
            if found.name == name and wanted.items() <= found.labels.items()
        )


def _extra_keys(lora_name: str | None, salt: str | None, blocks: int) -> tuple[tuple[str, ...], ...] | None:
    """As vLLM 0.32 writes them: the adapter in every block, the salt in the first."""
    adapter = (lora_name,) if lora_name else ()
    first = (*adapter, *((salt,) if salt else ()))
    return (first, *(adapter,) * (blocks - 1)) if first else None
