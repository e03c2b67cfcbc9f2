"""A decision record as JSON: the debug page and a line of the exported ledger. And back, for a replay.

Ids, addresses and numbers only; of an endpoint's labels those that thresholds look at. `inputs` is what the
source rule saw, so that `epp.ops.replay` can decide again; `read_inputs` is its inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_plugin.identity import EndpointId, fingerprint
from epp.core.decision_record import DecisionRecord
from epp.core.forecast import Forecast
from epp.core.pull_curves import PullPrediction
from epp.core.thresholds import ROLE_LABEL, SOURCE_CLASS_LABEL
from epp.core.types import (
    Candidate,
    ClaimState,
    Endpoint,
    EndpointMetrics,
    EngineInfo,
    InflightLoad,
    PrefixMatch,
    ScoredCandidate,
    SourceChoice,
)
from epp.telemetry.cost_metrics import cost_says, threshold_says

Json = dict[str, Any]

FORMAT = 1  # of a ledger line; a reader refuses a newer one
_MAX_MODEL_CHARS = 256
_LABELS = {"role": ROLE_LABEL, "source_class": SOURCE_CLASS_LABEL}


def decision_json(record: DecisionRecord) -> Json:
    """One decision record for people and tools."""
    decision, choice = record.decision, record.decision.choice
    source = choice.source
    return {
        "format": FORMAT,
        "decision_id": decision.decision_id,
        "request_id": decision.request_id,
        "model": decision.model[:_MAX_MODEL_CHARS],
        "prompt_tokens": decision.prompt_tokens,
        "destination": address_json(decision.destination),
        "fallbacks": [address_json(e) for e in decision.fallbacks],
        "prefill": address_json(decision.prefill) if decision.prefill else None,
        "source": address_json(source.endpoint)
        | {
            "servable_tokens": source.servable_tokens,
            "gain_tokens": source.gain_tokens,
            "verified": source.verified,
        }
        if source
        else None,
        "reason": choice.reason.value,
        "band": [[e.pod, tokens, weight] for e, tokens, weight in choice.considered],
        "band_size": choice.band_size,
        "refused": [[str(e), reason.value] for e, reason in choice.refused],
        "computing": str(decision.computing),
        "computing_cached_tokens": decision.computing_cached_tokens,
        "min_cached_token_delta": choice.min_cached_token_delta,
        "threshold_generation": choice.generation,
        "predicted": _predicted_json(choice),
        "candidates": [_candidate_json(s) for s in decision.scored],
        "forecasts": [_forecast_json(*item) for item in decision.forecasts.items()],
        "inputs": _inputs_json(record),
        "pull": _pull_json(record),
        "outcome": _outcome_json(record),
    }


def address_json(endpoint: Endpoint) -> Json:
    return {"pod": endpoint.id.pod, "rank": endpoint.id.rank, "address": endpoint.address}


def _candidate_json(scored: ScoredCandidate) -> Json:
    row = scored.candidate
    match = row.match
    return address_json(row.endpoint) | {
        "cached_tokens": match.cached_tokens,
        "expected_tokens": match.expected_tokens,  # with what is on its way there
        "device_tokens": match.device_blocks * match.block_size_tokens if match.state.has_claim else 0,
        "servable_tokens": match.servable_tokens,
        "state": match.state.value,
        "waiting": row.metrics.waiting_requests,
        "inflight": row.load.requests,
        "pulls_served": row.load.pulls_served,
        "score": round(scored.score, 6),
        "parts": {name: round(value, 6) for name, value in scored.parts},
    }


def _forecast_json(endpoint: EndpointId, found: Forecast) -> Json:
    """What an experimental policy foresaw for one endpoint."""
    return {
        "pod": endpoint.pod,
        "rank": endpoint.rank,
        "ttft_ms": round(found.total_ms, 3),
        "busy_ms": round(found.busy_ms, 3),
        "floor_ms": round(found.floor_ms, 3),
        "compute_ms": round(found.compute_ms, 3),
        "pull_ms": round(found.pull_ms, 3),
        "source": str(found.source) if found.source else None,
    }


def _inputs_json(record: DecisionRecord) -> Json | None:
    decision, choice = record.decision, record.decision.choice
    if decision.computed_by is None:
        return None
    return {
        "computing": _row_json(decision.computed_by),
        "holders": [_row_json(row) for row in choice.holders],
        "holders_total": choice.holders_total,
        "refused_peers": sorted(decision.refused_peers),
    }


def _row_json(row: Candidate) -> Json:
    endpoint, match, info = row.endpoint, row.match, row.metrics.info
    return address_json(endpoint) | {
        "p2p_address": endpoint.p2p_address,
        "labels": {name: endpoint.labels[key] for name, key in _LABELS.items() if key in endpoint.labels},
        "draining": endpoint.draining,
        "state": match.state.value,
        "blocks": match.blocks,
        "device_blocks": match.device_blocks,
        "cpu_blocks": match.cpu_blocks,
        "speculative_blocks": match.speculative_blocks,
        "block_size": match.block_size_tokens,
        "waiting": row.metrics.waiting_requests,
        "inflight": row.load.requests,
        "pulls_served": row.load.pulls_served,
        "engine": {"instance": info.instance, "p2p_addr": info.p2p_addr, "fp": fingerprint(info.pull_key)}
        if info
        else None,
    }


def _predicted_json(choice: SourceChoice) -> Json | None:
    """Both verdicts, whichever decided. None: no holder was priced."""
    predicted = choice.predicted
    if predicted is None:
        return None
    return {
        "gain_tokens": predicted.gain_tokens,
        "pull_ms": round(predicted.pull_ms, 3),
        "recompute_ms": round(predicted.recompute_ms, 3),
        "margin_ms": predicted.margin_ms,
        "hidden_ms": round(predicted.hidden_ms, 3),
        "cold_ms": round(predicted.cold_ms, 3),
        "sure": predicted.sure,
        "cost_says": cost_says(choice),
        "threshold_says": threshold_says(choice),
        "decided_by": "cost" if choice.by_cost else "threshold",
    }


def read_predicted(record: Mapping[str, Any]) -> PullPrediction | None:
    """Inverse of `predicted`. Raises KeyError, TypeError, ValueError where it is no such record."""
    row = record.get("predicted")
    if row is None:
        return None
    return PullPrediction(
        gain_tokens=int(row["gain_tokens"]),
        pull_ms=float(row["pull_ms"]),
        recompute_ms=float(row["recompute_ms"]),
        margin_ms=float(row["margin_ms"]),
        hidden_ms=float(row["hidden_ms"]),
        cold_ms=float(row["cold_ms"]),
        sure=row["sure"] is True,
    )


def _pull_json(record: DecisionRecord) -> Json:
    report = record.report
    if report is None:
        return {"state": record.pull_state.value}
    return {
        "state": record.pull_state.value,
        "promised_tokens": record.promised_tokens,
        "source": report.source,
        "asked_tokens": report.asked_tokens,
        "received_tokens": report.received_tokens,
        "received_bytes": report.received_bytes,
        "reason": report.reason,
        "ms": round(report.duration_ms, 3),
        "fallback": report.asked_tokens > report.received_tokens,  # the rest was computed
    }


def _outcome_json(record: DecisionRecord) -> Json | None:
    outcome = record.outcome
    if outcome is None:
        return None
    return {
        "status": outcome.status,
        "served_by": outcome.served_by,
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "cached_tokens": outcome.cached_tokens,
        "ttft_s": outcome.ttft_s,
        "completed": outcome.completed,
    }


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """What the source rule saw, read back. `holders` are the deepest of `holders_total`."""

    computing: Candidate
    holders: tuple[Candidate, ...]
    holders_total: int
    refused_peers: frozenset[str]


def read_inputs(record: Mapping[str, Any]) -> RuleInputs:
    """Inverse of `inputs`. Raises KeyError, TypeError, ValueError where it is no such record."""
    inputs = record["inputs"]
    return RuleInputs(
        _read_row(inputs["computing"]),
        tuple(_read_row(row) for row in inputs["holders"]),
        int(inputs["holders_total"]),
        frozenset(map(str, inputs["refused_peers"])),
    )


def _read_row(row: Mapping[str, Any]) -> Candidate:
    labels = {_LABELS[name]: str(value) for name, value in row["labels"].items()}
    host, _, port = str(row["address"]).rpartition(":")
    endpoint = Endpoint(
        EndpointId(str(row["pod"]), int(row["rank"])),
        host.strip("[]"),
        int(port),
        labels,
        bool(row["draining"]),
        str(row["p2p_address"]),
    )
    match = PrefixMatch(
        ClaimState(row["state"]),
        int(row["blocks"]),
        int(row["device_blocks"]),
        int(row["cpu_blocks"]),
        int(row["block_size"]),
        speculative_blocks=int(row["speculative_blocks"]),
    )
    waiting = None if row["waiting"] is None else float(row["waiting"])
    metrics = EndpointMetrics(waiting_requests=waiting, info=_read_engine(row["engine"]))
    load = InflightLoad(requests=int(row["inflight"]), pulls_served=int(row["pulls_served"]))
    return Candidate(endpoint, metrics, load, match)


def _read_engine(engine: Mapping[str, Any] | None) -> EngineInfo | None:
    """Enough of an engine's info to compare it: one fingerprint stands for all compared fields."""
    if engine is None:
        return None
    return EngineInfo(str(engine["instance"]), 0, "", str(engine["fp"]), "", "", "", str(engine["p2p_addr"]))
