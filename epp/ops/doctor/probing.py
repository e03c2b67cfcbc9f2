"""Checks of what the doctor's own requests showed: tokens, scores, headers, keys, bytes. Pure.

A pull passes four places: the sidecar must see the header, the engine must understand the key in the
body, the peer must serve, and bytes must arrive. A pull that fails is a finding of the first place
where it was lost, and of nobody if one of its two ends has been blamed for something already.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from engine_plugin import wire as engine_wire
from epp.ops.doctor.facts import Facts, PullFacts, TokenFacts
from epp.ops.doctor.findings import Check, Finding, Verdict
from epp.ops.doctor.reach import label_names
from sidecar import wire as sidecar_wire

_HEADER = sidecar_wire.KV_CACHE_SOURCE_HOST_PORT
_KEY = f"{engine_wire.KV_TRANSFER_PARAMS}.{engine_wire.REMOTE_KV_SOURCE}"
_UNSIGNED = ("unsigned",)
_DROP_REMEDIES = {
    "signature_wrong": "give picker, sidecars and doctor the same --routing-key-file",
    "signature_stale": "keep time with NTP on both nodes",
    "not_allowed": "the source is not in the sidecar's endpoint file: is it the picker's?",
    "pull_disabled": "start the sidecar with --kv-connector offloading, or with --enable-p2p-pull",
}
_PULL_REMEDIES = {
    "refused_identity": "the engines differ in what peers compare; both count it by field in their metrics",
    "refused_auth": "give both engines the same peer key",
    "refused_limit": "the source serves as many as it may; try again when it is less busy",
    "unreachable": "open the p2p port between the pods, and check the p2p_port of the source's row",
    "miss": "the source no longer holds it: is its CPU tier too small, or offloading off?",
    "timeout": "look at both engines' logs: the transfer did not end in time",
    "no_slots": "the destination's CPU tier has no free slot: make it larger",
    "mover_down": "the destination's or source's mover process has died; look at the engine's log",
}


class Lost(enum.Enum):
    """Where a pull was lost."""

    NOWHERE = "nowhere"
    REQUEST = "request"  # it was not even answered
    HEADER = "header"
    KEY = "key"
    HEADER_OR_KEY = "header or key"
    TRANSFER = "transfer"
    UNSIGNED = "unsigned"  # the doctor may not name a source
    UNKNOWN = "unknown"


def where_lost(pull: PullFacts) -> Lost:
    """From the counters of sidecar and engine alone."""
    if pull.fault is not None:
        return Lost.REQUEST
    if (pull.received_bytes or 0) > 0 or (pull.external_tokens or 0) > 0:
        return Lost.NOWHERE
    if any(pull.sidecar_drops.get(reason) for reason in _UNSIGNED):
        return Lost.UNSIGNED
    if pull.sidecar_pulls == 0:
        return Lost.HEADER
    if pull.engine_pulls is None:
        return Lost.UNKNOWN if pull.external_tokens is None else Lost.HEADER_OR_KEY
    if not sum(pull.engine_pulls.values()):
        return Lost.KEY if pull.sidecar_pulls else Lost.HEADER_OR_KEY
    return Lost.TRANSFER


def tokens(facts: Facts, blamed: frozenset[str]) -> Check:
    """The picker's tokens of a text are the engine's: otherwise no block ever matches."""
    found: list[Finding] = []
    compared = [fact for fact in facts.tokens if fact.fault is None]
    for fact in facts.tokens:
        if fact.picker_fault:
            found.append(_no_tokens(fact))
        elif fact.fault is None and not fact.equal and fact.endpoint not in blamed:
            found.append(
                Finding(
                    fact.endpoint,
                    f"{fact.form}: its /tokenize gives {fact.engine_count} tokens, {fact.picker}"
                    f" {fact.picker_count}, and not the same",
                    "give the picker the tokenizer and chat template of the engines (docs/tokens.md)",
                    endpoints=frozenset({fact.endpoint}),
                )
            )
    seen = f"{len(compared)} comparisons" if compared else _unprobed(facts, "no engine has /tokenize")
    return Check("tokens equal", seen, tuple(dict.fromkeys(found)), judged=bool(compared or found))


def _no_tokens(fact: TokenFacts) -> Finding:
    return Finding(
        fact.picker,
        f"{fact.form}: {fact.fault}",
        "configure token-producer, or start the picker with --tokenizer (docs/tokens.md)",
    )


def scores(facts: Facts, blamed: frozenset[str]) -> Check:
    """A prompt that was just computed is known to the picker when it comes again."""
    repeat = facts.repeat
    if repeat is None:
        return Check("scores", _unprobed(facts, "give --gateway"), judged=False)
    mute = sorted(name for name, engine in facts.engines.items() if engine.fault is not None)
    if repeat.fault is not None and repeat.taken and mute:
        return Check(
            "scores", f"no answer; {', '.join(mute)} may have had the request, see above", judged=False
        )
    if repeat.fault is not None:
        remedy = (
            "is it the gateway in front of this picker, does it route to the pool, and do both speak TLS "
            "(or neither: --secure-serving)?"
        )
        return Check("scores", "no answer", (Finding(repeat.gateway, repeat.fault, remedy),))
    found: tuple[Finding, ...] = ()
    if repeat.prompt_tokens is None:
        evidence = "a prompt sent through the gateway was not tokenised: it is routed by load"
        found = (Finding(repeat.gateway, evidence, "see `tokens equal` and the picker's log"),)
    elif repeat.best_cached_tokens == 0 and repeat.computing in blamed:
        return Check("scores", f"{repeat.computing} computed it, see above", judged=False)
    elif repeat.best_cached_tokens == 0:
        evidence = (
            f"{repeat.computing} computed a prompt of {repeat.prompt_tokens} tokens; sent {repeat.repeats}"
            f" times more, no endpoint scored for it ({repeat.reason})"
        )
        remedy = (
            "see `subscriptions` and `tokens equal`; is prefix caching on, is the prompt longer than a block?"
        )
        found = (Finding(repeat.computing, evidence, remedy),)
    return Check("scores", f"{repeat.best_cached_tokens} tokens known at the repetition", found)


def headers(facts: Facts, blamed: frozenset[str]) -> Check:
    """The sidecar sees the source header, and follows it."""
    found = list(_lost_before_sidecar(facts))
    for pull in _open(facts, blamed):
        if where_lost(pull) is Lost.HEADER:
            found.append(_header_finding(pull))
    counted = [pull for pull in facts.pulls if pull.sidecar_pulls is not None]
    if any(where_lost(pull) is Lost.UNSIGNED for pull in facts.pulls):
        return Check(
            "header through", "sidecars want signatures: give --routing-key-file", tuple(found), False
        )
    if not counted:
        why = _unprobed(facts, "give --sidecar-metrics-port")
        return Check("header through", why, tuple(found), judged=False)
    followed = sum(bool(pull.sidecar_pulls) for pull in counted)
    return Check("header through", f"{followed} of {len(counted)} seen by the sidecar", tuple(found))


def _lost_before_sidecar(facts: Facts) -> Iterator[Finding]:
    """Sources that pickers have named and no sidecar has heard of."""
    named = sum(picker.pull_decisions or 0.0 for picker in facts.pickers)
    engines = facts.engines.values()
    if not engines or named < 1 or any(engine.sidecar_pulls is None for engine in engines):
        return
    heard = sum((e.sidecar_pulls or 0.0) + sum(e.sidecar_drops.values()) for e in engines)
    if heard == 0:
        yield Finding(
            "gateway",
            f"pickers have named a source {named:.0f} times, no sidecar has seen {_HEADER}",
            "let the gateway strip that header before ext_proc and not after it",
        )


def _header_finding(pull: PullFacts) -> Finding:
    dropped = sorted(reason for reason, count in pull.sidecar_drops.items() if count)
    evidence = f"{_HEADER}: sent to its sidecar, not followed"
    if dropped:
        evidence += f" ({', '.join(dropped)})"
    unknown = "update the sidecar: it does not know this header (older releases read other names)"
    remedy = next((_DROP_REMEDIES[reason] for reason in dropped if reason in _DROP_REMEDIES), unknown)
    return Finding(pull.destination, evidence, remedy, endpoints=frozenset({pull.destination}))


def key_names(facts: Facts, blamed: frozenset[str]) -> Check:
    """Labels, metric names and body keys: one side renamed, and pulls are inert without an error."""
    found = [f for row in facts.endpoints if row.name not in blamed and (f := label_names(facts, row))]
    named = blamed.union(*(finding.endpoints for finding in found))
    for pull in _open(facts, named):
        lost = where_lost(pull)
        if lost in (Lost.KEY, Lost.HEADER_OR_KEY):
            found.append(_key_finding(pull, sure=lost is Lost.KEY))
    judged = bool(facts.engines)
    return Check("key names", f"{len(facts.engines)} pages, {len(facts.pulls)} pulls", tuple(found), judged)


def _key_finding(pull: PullFacts, *, sure: bool) -> Finding:
    evidence = f"its sidecar sent {_KEY}, its engine did not take it for a pull"
    remedy = f"engine and sidecar must use the same keys: this release writes {_KEY} (older ones: p2p)"
    if not sure:
        evidence = f"its engine saw no pull although {_HEADER} named {pull.source}"
        remedy += "; --sidecar-metrics-port tells a lost header from an unknown key"
    return Finding(pull.destination, evidence, remedy, endpoints=frozenset({pull.destination}))


def moved(facts: Facts, blamed: frozenset[str]) -> Check:
    """A pull that both sides understood brings bytes, counted at both ends."""
    found: list[Finding] = []
    for pull in _open(facts, blamed):
        match where_lost(pull):
            case Lost.REQUEST:
                remedy = "does the pod serve on this address, and is the model's name right (--model)?"
                found.append(_pair_finding(pull, f"the request failed: {pull.fault}", remedy))
            case Lost.TRANSFER:
                found.append(_transfer_finding(pull))
            case Lost.NOWHERE if pull.served_bytes == 0 and pull.received_bytes:
                evidence = f"{pull.received_bytes:.0f} bytes came, the source counts none as served"
                remedy = "is p2p_port of the source's row another engine's?"
                found.append(_pair_finding(pull, evidence, remedy))
            case _:
                pass
    good = [pull for pull in facts.pulls if where_lost(pull) is Lost.NOWHERE]
    total = sum(pull.received_bytes or 0.0 for pull in good)
    if not facts.pulls:
        why = "one endpoint only" if len(facts.endpoints) < 2 else _unprobed(facts, "no pull was tried")
        return Check("bytes moved", why, judged=False)
    seen = f"{len(good)} of {len(facts.pulls)} forced pulls, {total:.0f} bytes"
    return Check("bytes moved", seen, tuple(found), judged=bool(good or found))


def _transfer_finding(pull: PullFacts) -> Finding:
    reasons = sorted(reason for reason, count in (pull.engine_pulls or {}).items() if count)
    evidence = f"no byte came: {', '.join(reasons) or 'no reason given'}"
    if not pull.primed:
        evidence += f"; {pull.source} has not announced the prefix in its CPU tier"
    default = "look at both engines' logs for this pull"
    remedy = next((_PULL_REMEDIES[reason] for reason in reasons if reason in _PULL_REMEDIES), default)
    return _pair_finding(pull, evidence, remedy)


def _pair_finding(pull: PullFacts, evidence: str, remedy: str) -> Finding:
    return Finding(f"{pull.destination} <- {pull.source}", evidence, remedy, Verdict.FAULT, pull.pair)


def _open(facts: Facts, blamed: frozenset[str]) -> Iterator[PullFacts]:
    """Pulls whose two ends nobody has found fault with."""
    return (pull for pull in facts.pulls if not pull.pair & blamed)


def _unprobed(facts: Facts, otherwise: str) -> str:
    return otherwise if facts.probed else "left out (--passive)"
