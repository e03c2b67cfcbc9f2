"""A healthy fleet of three as the doctor's gatherers would describe it; tests change one thing at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine_plugin import wire
from epp.ops.doctor.examine import examine
from epp.ops.doctor.facts import EngineFacts, Facts, Listed, PickerFacts, PullFacts, RepeatFacts, TokenFacts
from epp.ops.doctor.findings import Check, Verdict

NAMES = ("a/0", "b/0", "c/0")
URL = "http://127.0.0.1:9090"


def p2p(name: str) -> str:
    return f"10.0.0.{NAMES.index(name) + 1}:7777"


def row(name: str, **changes: Any) -> Listed:
    """One endpoint of the picker's list; `info_x` changes a field of its info."""
    info = {"block_size": "16", "hash_algo": "sha256", "seed_fp": "s", "model_fp": "m", "layout_fp": "l"}
    info |= {"protocol": "1", "instance": name, "p2p_addr": p2p(name)}
    info |= {key.removeprefix("info_"): changes.pop(key) for key in list(changes) if key.startswith("info_")}
    host = f"10.0.0.{NAMES.index(name) + 1}"
    listed = Listed(
        name=name,
        address=f"{host}:8000",
        host=host,
        state="live",
        p2p_address=p2p(name),
        events_port=5557,
        replay_port=5657,
        waiting_known=True,
        metrics_age_s=0.1,
        block_size_tokens=16,
        cpu_blocks=40,
        info=info,
        differs_from_pool=False,
        hashes_unlike=None,
        events={},
    )
    return replace(listed, **changes)


def engine(name: str, **changes: Any) -> EngineFacts:
    info = dict.fromkeys(wire.ENGINE_INFO_LABELS, "x")
    info |= {"p2p_addr": p2p(name), "events_port": "5557", "replay_port": "5657"}
    facts = EngineFacts(
        info_labels=tuple(info),
        info=info,
        metric_names=frozenset({"vllm:num_requests_waiting"}),
        model="m",
        clock_offset_s=0.0,
        sidecar_pulls=1.0,
    )
    return replace(facts, **changes)


def pull(source: str, destination: str, **changes: Any) -> PullFacts:
    fact = PullFacts(
        source,
        destination,
        sidecar_pulls=1.0,
        engine_pulls={"ok": 1.0},
        received_bytes=4096.0,
        served_bytes=4096.0,
    )
    return replace(fact, **changes)


def lost(source: str, destination: str, **changes: Any) -> PullFacts:
    """A pull that brought nothing."""
    return pull(source, destination, received_bytes=0.0, served_bytes=0.0, **changes)


def picker(*rows: Listed, **changes: Any) -> PickerFacts:
    thresholds: Mapping[str, Any] = {"configured": True, "active": True, "rejected": None, "rules": []}
    facts = PickerFacts(URL, endpoints=rows, thresholds=thresholds, pull_decisions=3.0, clock_offset_s=0.0)
    return replace(facts, **changes)


def healthy(**changes: Any) -> Facts:
    """`rows` and `engines` replace single endpoints by name."""
    rows = {name: row(name) for name in NAMES} | changes.pop("rows", {})
    engines = {name: engine(name) for name in NAMES} | changes.pop("engines", {})
    ring = tuple(pull(source, NAMES[(n + 1) % 3]) for n, source in enumerate(NAMES))
    facts = Facts(
        (picker(*rows.values()),),
        engines,
        tokens=tuple(TokenFacts(URL, name, "/v1/completions", 9, 9, equal=True) for name in NAMES),
        repeat=RepeatFacts("http://gw", prompt_tokens=400, best_cached_tokens=384, computing="a/0"),
        pulls=ring,
    )
    return replace(facts, **changes)


def faults(facts: Facts, verdict: Verdict = Verdict.FAULT) -> list[tuple[str, str]]:
    """(check, place) of every finding of that kind."""
    return [(c.name, f.place) for c in examine(facts) for f in c.findings if f.verdict is verdict]


def check(facts: Facts, name: str) -> Check:
    return next(check for check in examine(facts) if check.name == name)
