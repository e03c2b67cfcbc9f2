"""Checks of who reaches whom: pickers, engines, ports, event subscriptions, clocks, shared memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from engine_plugin import wire
from epp.ops.doctor.facts import Facts, Listed, PickerFacts
from epp.ops.doctor.findings import Check, Finding, Verdict
from sidecar.routing_auth import MAX_AGE_S

_WARN_SKEW_S = 5.0
_FAULT_SKEW_S = MAX_AGE_S / 2
_FULL_SHARE = 0.02  # free share of /dev/shm under which the next engine start fails
_STALE_METRICS_S = 10.0
_UNUSED_METRICS_S = 2.0  # where the picker does not use them any more (its --metrics-staleness-threshold)


def pickers(facts: Facts, _: frozenset[str]) -> Check:
    found = [finding for picker in facts.pickers for finding in _picker(picker)]
    in_force = {str((p.thresholds.get("active"), p.thresholds.get("rules"))) for p in _answering(facts)}
    if len(in_force) > 1:
        found.append(
            Finding(
                ", ".join(p.url for p in _answering(facts)),
                "the replicas do not have the same thresholds in force",
                "compare them with `kvpull thresholds show`; give all the same ConfigMaps",
                Verdict.WARNING,
            )
        )
    return Check("pickers", f"{len(_answering(facts))} of {len(facts.pickers)} answer", tuple(found))


def _answering(facts: Facts) -> list[PickerFacts]:
    return [picker for picker in facts.pickers if picker.fault is None]


def _picker(picker: PickerFacts) -> Iterator[Finding]:
    url, thresholds = picker.url, picker.thresholds
    if picker.fault is not None:
        yield Finding(url, picker.fault, "give the picker's metrics port and its --debug-token-file")
        return
    if not picker.endpoints:
        yield Finding(
            url, "it knows of no endpoint", "look at the endpoint file or the InferencePool's selector"
        )
    if thresholds.get("rejected"):
        yield Finding(
            url,
            f"the newest thresholds were refused: {thresholds['rejected']}",
            "mend that document; `kvpull thresholds check FILE` says the same without a picker",
        )
    if not thresholds.get("configured"):
        yield Finding(
            url,
            "p2p-source-producer is not configured: nothing is ever pulled",
            "add it to the EndpointPickerConfig",
            Verdict.WARNING,
        )
    elif not thresholds.get("active"):
        yield Finding(
            url,
            f"pulls are off: enabled {thresholds.get('enabled')},"
            f" minCachedTokenDelta {thresholds.get('minCachedTokenDelta')}",
            "set both in a PullThresholds document, above the measured crossover",
            Verdict.WARNING,
        )


def engines(facts: Facts, _: frozenset[str]) -> Check:
    """Each answers at its serving address, and the picker knows its load."""
    found = []
    for row in facts.endpoints:
        engine = facts.engines.get(row.name)
        if engine is not None and engine.fault is not None:
            found.append(
                _at(
                    row, f"{row.address}: {engine.fault}", "is the pod up, and does the address belong to it?"
                )
            )
        elif row.metrics_age_s is None or row.metrics_age_s > (
            _STALE_METRICS_S if row.waiting_known else _UNUSED_METRICS_S
        ):
            age = "never" if row.metrics_age_s is None else f"{row.metrics_age_s:.0f} s ago"
            found.append(
                _at(
                    row, f"the picker scraped its /metrics {age}", "is metrics_port of its row the right one?"
                )
            )
    return Check("engines", f"{len(facts.endpoints)} serving addresses", tuple(found))


def ports(facts: Facts, blamed: frozenset[str]) -> Check:
    """The ports that picker and sidecars use are those that the engine listens on."""
    found = [f for row in facts.endpoints if row.name not in blamed for f in _ports(facts, row)]
    told = sum(bool(engine.info) for engine in facts.engines.values())
    return Check("ports", f"p2p, events, replay; {told} engines tell theirs", tuple(found))


def _ports(facts: Facts, row: Listed) -> Iterator[Finding]:
    engine = facts.engines.get(row.name)
    if engine is None or engine.fault is not None:
        return
    told, remedy = engine.info.get("p2p_addr", ""), "correct p2p_port of its row in the endpoint file"
    if told and row.p2p_address and told != row.p2p_address:
        yield _at(row, f"peers are sent to {row.p2p_address}, its engine listens on {told}", remedy)
    elif "p2p" in engine.closed:
        yield _at(
            row,
            f"p2p port {row.p2p_address}: {engine.closed['p2p']}",
            "is the transport on (VLLM_P2P_SIDE_CHANNEL_HOST = pod IP, not 0.0.0.0), is the port open?",
        )
    for label, used in (("events_port", row.events_port), ("replay_port", row.replay_port)):
        own = engine.info.get(label, "0")
        if used and own.isdigit() and int(own) not in (0, used):
            yield _at(
                row,
                f"the picker listens to its {label} {used}, the engine says {own}",
                f"correct {label} of its row in the endpoint file",
            )


def subscriptions(facts: Facts, blamed: frozenset[str]) -> Check:
    """Every replica has a claim about every endpoint's cache."""
    found: list[Finding] = []
    for picker in _answering(facts):
        for row in picker.endpoints:
            if row.name not in blamed and not row.has_claim:
                found.append(_deaf(facts, picker, row))
    rows = [row for picker in _answering(facts) for row in picker.endpoints]
    live = sum(row.has_claim for row in rows)
    return Check("subscriptions", f"{live} of {len(rows)} live", tuple(found))


def _deaf(facts: Facts, picker: PickerFacts, row: Listed) -> Finding:
    """No claim: the engine sends nothing, or nothing that can be read."""
    engine = facts.engines.get(row.name)
    kinds = {kind: int(n) for kind, n in picker.messages.get(row.name, {}).items() if n}
    where = f"{picker.url} has no claim about it (state {row.state})"
    if row.state == "unsupported":
        return _at(
            row, f"{where}: a cache group of its model has no rule", "it is routed by load; see docs/index.md"
        )
    if engine is not None and engine.info.get("events_port") == "0":
        return _at(row, f"{where}: its engine publishes no KV events", _EVENTS_ON)
    if engine is not None and "events" in engine.closed:
        return _at(row, f"{where}: events port {row.events_port}: {engine.closed['events']}", _EVENTS_ON)
    if any(kind.startswith(("malformed", "undecodable")) for kind in kinds):
        return _at(
            row, f"{where}: messages came and could not be read: {kinds}", "run an engine of a known version"
        )
    return _at(
        row,
        f"{where}: {sum(kinds.values())} messages came",
        "is the replay socket reachable, and is only one publisher behind the port?",
    )


_EVENTS_ON = (
    'start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint":'
    ' "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\' and prefix caching on'
)


def clocks(facts: Facts, _: frozenset[str]) -> Check:
    """Routing headers are signed with a time: picker and sidecars must agree to within a minute."""
    found: list[Finding] = []
    pickers_s = [p.clock_offset_s for p in _answering(facts) if p.clock_offset_s is not None]
    seen = 0.0
    for row in facts.endpoints:
        engine = facts.engines.get(row.name)
        own_s = None if engine is None else engine.sidecar_offset_s
        if own_s is None and engine is not None:
            own_s = engine.clock_offset_s
        stale = 0.0 if engine is None else engine.sidecar_drops.get("signature_stale", 0.0)
        skew_s = max((abs(own_s - p) for p in pickers_s), default=0.0) if own_s is not None else 0.0
        seen = max(seen, skew_s)
        if skew_s > _WARN_SKEW_S or stale:
            verdict = Verdict.FAULT if skew_s > _FAULT_SKEW_S else Verdict.WARNING
            found.append(
                Finding(
                    row.name,
                    f"its clock and a picker's are {skew_s:.0f} s apart; {stale:.0f} signatures were too old",
                    f"keep time with NTP on both nodes; signatures are good for {MAX_AGE_S:.0f} s",
                    verdict,
                    frozenset({row.name}) if verdict is Verdict.FAULT else frozenset(),
                )
            )
    return Check("clocks", f"at most {seen:.0f} s apart", tuple(found), judged=bool(pickers_s))


def shared_memory(facts: Facts, _: frozenset[str]) -> Check:
    """/dev/shm, where CPU tiers lie, as seen from where the doctor runs."""
    shm, found = facts.shm, []
    if shm is None:
        return Check("shared memory", "/dev/shm is not readable here", judged=False)
    if shm.size_bytes and shm.free_bytes < shm.size_bytes * _FULL_SHARE:
        found.append(
            Finding(
                shm.path,
                f"{shm.free_bytes >> 20} of {shm.size_bytes >> 20} MiB are free",
                "make the pod's emptyDir (medium Memory) larger than the CPU tiers of all its ranks together",
                Verdict.WARNING,
            )
        )
    if shm.stale:
        found.append(
            Finding(
                shm.path,
                f"left over, mapped by no process: {', '.join(shm.stale[:5])}",
                "delete them before the next engine start: it would find them in its way",
                Verdict.WARNING,
            )
        )
    return Check("shared memory", f"{shm.path}: {shm.free_bytes >> 20} MiB free", tuple(found))


def label_names(facts: Facts, row: Listed) -> Finding | None:
    """The engine reports itself under the names of today."""
    engine = facts.engines.get(row.name)
    if engine is None or engine.fault is not None:
        return None
    missing = [name for name in wire.ENGINE_INFO_LABELS if name not in (engine.info_labels or ())]
    if engine.info_labels is not None and missing:
        extra = sorted(set(engine.info_labels) - set(wire.ENGINE_INFO_LABELS))
        other = f"; it has {', '.join(extra)} instead" if extra else ""
        return _at(
            row,
            f"{wire.ENGINE_INFO} lacks the labels {', '.join(missing)}{other}",
            "engine plugin and picker are of different releases: update the older one",
        )
    if not row.waiting_known and engine.metric_names:
        return _at(
            row,
            "its /metrics has no queue under a name that the picker reads (vllm:num_requests_waiting)",
            "run an engine of a known version; without it the load of this endpoint is unknown",
        )
    return None


def _at(row: Listed, evidence: str, remedy: str) -> Finding:
    return Finding(row.name, evidence, remedy, endpoints=frozenset({row.name}))
