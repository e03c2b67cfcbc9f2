"""`kvpull explain`: one decision, in sentences. The record is the picker's; nothing is decided here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from epp.ops.asking import STRANGE, ask_all
from epp.ops.text import printable

Record = Mapping[str, Any]

_REASONS = {
    "pull": "a peer holds enough more of the prompt",
    "not_configured": "p2p-source-producer is not configured",
    "switched_off": "thresholds switch pulls off",
    "no_threshold": "no minCachedTokenDelta is set, neither in a document nor in the producer",
    "no_tokens": "the prompt could not be tokenised",
    "no_claim": "no endpoint's cache state is known yet",
    "destination_unknown": "the computing endpoint's own cache state is not known",
    "no_holder": "no peer holds a block of this prompt in its CPU tier",
    "local_best": "the computing endpoint is itself the holder that was sampled",
    "below_delta": "the sampled holder has less than minCachedTokenDelta tokens more",
    "not_cheaper": "pulling would take longer than computing (cost mode)",
    "draining": "the best holder is draining",
    "peer_refused": "the two engines have refused each other",
    "unverified": "requireVerified is set and the holder or the computing engine reports no engine info",
    "incompatible": "the best holder's block size, hash, model or layout differs",
    "over_limit": "the best holder serves as many pulls as it may",
}


def explain(arguments: argparse.Namespace) -> int:
    """0: printed; 1: no picker knows it; 3: not found, and some picker could not be asked."""
    unasked = False
    for answer in ask_all(arguments, f"/debug/kvpull/decisions/{quote(arguments.id, safe='')}"):
        fault = answer.fault
        if answer.found:
            try:
                said = json.dumps(answer.body, indent=2) if arguments.json else "\n".join(lines(answer.body))
            except STRANGE:
                fault = "its answer is no decision record"
            else:
                print("\n".join(map(printable, said.splitlines())))
                return 0
        if fault is not None:
            unasked = True
            print(f"kvpull: {answer.url}: {fault}", file=sys.stderr)
    print(f"kvpull: no decision {arguments.id!r} is known (any more)", file=sys.stderr)
    return 3 if unasked else 1


def lines(record: Record) -> Iterator[str]:
    """A decision for people."""
    model = record["model"] or "no model"
    yield f"decision {record['decision_id']} of request {record['request_id']} ({model})"
    tokens = record["prompt_tokens"]
    yield f"  prompt: {'not tokenised' if tokens is None else f'{tokens} tokens'}"
    yield f"  sent to {_name(record['destination'])}{_prefill(record)}"
    yield f"  computed on {record['computing']}, which held {record['computing_cached_tokens']} tokens of it"
    yield from _source(record)
    yield from _candidates(record)
    yield from _forecasts(record.get("forecasts", ()))
    yield from _end(record)


def _name(endpoint: Mapping[str, Any]) -> str:
    return f"{endpoint['pod']}/{endpoint['rank']} ({endpoint['address']})"


def _prefill(record: Record) -> str:
    return f", prefill on {_name(record['prefill'])}" if record["prefill"] else ""


def _source(record: Record) -> Iterator[str]:
    reason, source = record["reason"], record["source"]
    said = _REASONS.get(reason, reason)
    delta = record["min_cached_token_delta"]
    in_force = f"minCachedTokenDelta {delta}, thresholds generation {record['threshold_generation']}"
    if source is None:
        yield f"  no source: {reason}: {said} ({in_force})"
    else:
        unverified = "" if source["verified"] else ", unverified"
        yield f"  source {_name(source)}{unverified}: {said} ({in_force})"
        yield f"    it can serve {source['servable_tokens']} tokens, {source['gain_tokens']} more than held"
    yield from _predicted(record.get("predicted"))
    total = sum(weight for _, _, weight in record["band"])
    for pod, servable_tokens, weight in record["band"]:
        share = f"{weight / total:.0%} of those shown" if total else ""
        yield f"    considered {pod}: {servable_tokens} tokens, weight {weight:.4f} ({share})"
    if record["band_size"] > len(record["band"]):
        yield f"    and {record['band_size'] - len(record['band'])} more within one block of the best"
    for endpoint, why in record["refused"]:
        yield f"    passed over {endpoint}: {why}: {_REASONS.get(why, why)}"


def _predicted(row: Mapping[str, Any] | None) -> Iterator[str]:
    if row is None:
        return
    cold = f" ({row['cold_ms']:g} of it for a first session)" if row["cold_ms"] else ""
    hidden = f", {row['hidden_ms']:g} ms of it while others compute" if row["hidden_ms"] else ""
    yield (
        f"    predicted for {row['gain_tokens']} tokens: pull {row['pull_ms']:g} ms{cold}{hidden}, computing"
        f" {row['recompute_ms']:g} ms, margin {row['margin_ms']:g} ms{'' if row['sure'] else ' (unsure)'}"
    )
    yield (
        f"    cost says {row['cost_says']}, the threshold says {row['threshold_says']};"
        f" the {row['decided_by']} decided"
    )


def _candidates(record: Record) -> Iterator[str]:
    yield "  best candidates:"
    for row in record["candidates"]:
        parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"].items())
        yield (
            f"    {row['pod']}/{row['rank']}: score {row['score']:g} ({parts}); cached {row['cached_tokens']}"
            f" (device {row['device_tokens']}, CPU {row['servable_tokens']}; {row['state']}), waiting"
            f" {_known(row['waiting'])}, in flight {row['inflight']}, pulls served {row['pulls_served']}"
        )


def _forecasts(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What an experimental policy foresaw, soonest first."""
    for row in sorted(rows, key=lambda row: float(row["ttft_ms"])):
        pull = f"pull from {row['source']} {row['pull_ms']:g} + " if row["source"] else ""
        yield (
            f"    foreseen on {row['pod']}/{row['rank']}: first token after {row['ttft_ms']:g} ms = others"
            f" {row['busy_ms']:g} + {pull}computing {row['compute_ms']:g} + every request {row['floor_ms']:g}"
        )


def _known(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


def _end(record: Record) -> Iterator[str]:
    pull, outcome = record["pull"], record["outcome"]
    if pull["state"] == "pending":
        yield "  pull: the engine has not reported it yet"
    elif pull["state"] == "unknown":
        yield "  pull: unknown; the engine did not report its end in time"
    elif pull["state"] == "reported":
        fell_back = "; the rest was computed" if pull["fallback"] else ""
        yield (
            f"  pull: {pull['received_tokens']} of {pull['asked_tokens']} tokens asked came"
            f" ({pull['promised_tokens']} were promised), {pull['received_bytes']} bytes in"
            f" {pull['ms']:g} ms: {pull['reason']}{fell_back}"
        )
    if outcome is None:
        yield "  the answer has not ended yet"
        return
    ttft = "no first token" if outcome["ttft_s"] is None else f"first token after {outcome['ttft_s']:.3f} s"
    cached = outcome["cached_tokens"]
    usage = "" if cached is None else f", the engine counted {cached} cached tokens"
    complete = "complete" if outcome["completed"] else "cut short"
    yield f"  answer: status {outcome['status']}, {complete}, {ttft}{usage}"
