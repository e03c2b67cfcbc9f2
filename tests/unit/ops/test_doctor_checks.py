"""The doctor's checks on gathered facts: each fault is found, named once, and blamed on nobody else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epp.ops.doctor.examine import CHECKS, examine, has_fault
from epp.ops.doctor.facts import Facts, PickerFacts, PullFacts, RepeatFacts, ShmFacts, TokenFacts
from epp.ops.doctor.findings import Verdict
from epp.ops.doctor.probing import Lost, where_lost
from epp.ops.doctor.report import as_json, lines
from tests.unit.ops.doctor_facts import URL, check, engine, faults, healthy, lost, picker, pull, row


def test_a_healthy_fleet_has_no_finding() -> None:
    checks = examine(healthy(shm=ShmFacts("/dev/shm", 1 << 30, 1 << 29)))
    assert {c.name: c.verdict for c in checks if c.verdict is not Verdict.OK} == {}
    assert not has_fault(checks)
    assert len(checks) == len(CHECKS) == 14


def wrong_pulls(reason: str = "refused_identity") -> tuple[PullFacts, ...]:
    """Everything that c takes part in fails."""
    failed = {"engine_pulls": {reason: 1.0}}
    return (pull("a/0", "b/0"), lost("b/0", "c/0", **failed), lost("c/0", "a/0", **failed))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (healthy(rows={"c/0": row("c/0", info_seed_fp="t")}, pulls=wrong_pulls()), "hash seeds"),
        (healthy(rows={"c/0": row("c/0", info_hash_algo="xx")}, pulls=wrong_pulls()), "hash seeds"),
        (healthy(rows={"c/0": row("c/0", info=None, hashes_unlike="a/0")}), "hash seeds"),
        (healthy(rows={"c/0": row("c/0", info=None, differs_from_pool=True)}), "block sizes"),
        (
            healthy(
                rows={"c/0": row("c/0", info_block_size="32", info_layout_fp="k", differs_from_pool=True)},
                pulls=wrong_pulls(),
            ),
            "block sizes",
        ),
        (healthy(rows={"c/0": row("c/0", info_layout_fp="tp2")}, pulls=wrong_pulls()), "model and layout"),
        (
            healthy(rows={"c/0": row("c/0", p2p_address="10.0.0.3:1")}, pulls=wrong_pulls("unreachable")),
            "ports",
        ),
        (healthy(engines={"c/0": engine("c/0", closed={"p2p": "refused"})}, pulls=wrong_pulls()), "ports"),
        (healthy(rows={"c/0": row("c/0", events_port=1, state="unknown")}), "ports"),
        (healthy(rows={"c/0": row("c/0", state="syncing")}), "subscriptions"),
        (healthy(rows={"c/0": row("c/0", state="unsupported")}), "subscriptions"),
        (healthy(engines={"c/0": engine("c/0", fault="status 502", info={})}), "engines"),
        (healthy(rows={"c/0": row("c/0", metrics_age_s=None)}), "engines"),
        (healthy(rows={"c/0": row("c/0", metrics_age_s=4.0, waiting_known=False)}), "engines"),
        (healthy(engines={"c/0": engine("c/0", info_labels=("rank", "seed"))}), "key names"),
        (healthy(rows={"c/0": row("c/0", waiting_known=False)}), "key names"),
        (healthy(engines={"c/0": engine("c/0", clock_offset_s=45.0)}), "clocks"),
        (healthy(tokens=(TokenFacts(URL, "c/0", "/v1/completions", 9, 8, equal=False),)), "tokens equal"),
    ],
)
def test_a_fault_of_one_endpoint_is_named_once(facts: Facts, expected: str) -> None:
    assert faults(facts) == [(expected, "c/0")]
    finding = check(facts, expected).findings[0]
    assert finding.evidence
    assert finding.remedy
    assert finding.endpoints == {"c/0"}


def test_the_first_difference_between_two_engines_names_one_of_them() -> None:
    rows = {"b/0": row("b/0", info_seed_fp="t")}
    facts = replace(healthy(), pickers=(picker(row("a/0"), rows["b/0"]),))
    assert faults(facts) == [("hash seeds", "b/0")]
    assert "half of the pool" in check(facts, "hash seeds").findings[0].evidence


def test_no_events_is_told_from_a_closed_port_and_from_unreadable_messages() -> None:
    silent = row("c/0", state="unknown")
    off = engine("c/0", info=dict(engine("c/0").info) | {"events_port": "0"}, closed={"events": "refused"})
    said = check(healthy(rows={"c/0": silent}, engines={"c/0": off}), "subscriptions").findings[0]
    assert "publishes no KV events" in said.evidence
    assert "--kv-events-config" in said.remedy
    shut = engine("c/0", closed={"events": "Connection refused"})
    said = check(healthy(rows={"c/0": silent}, engines={"c/0": shut}), "subscriptions").findings[0]
    assert "events port 5557: Connection refused" in said.evidence
    rows = (row("a/0"), row("b/0"), silent)
    garbled = replace(healthy(), pickers=(picker(*rows, messages={"c/0": {"malformed_frames": 4.0}}),))
    assert "could not be read" in check(garbled, "subscriptions").findings[0].evidence


@pytest.mark.parametrize(
    ("fact", "where"),
    [
        (pull("a/0", "b/0"), Lost.NOWHERE),
        (lost("a/0", "b/0", sidecar_pulls=0.0, engine_pulls={}), Lost.HEADER),
        (lost("a/0", "b/0", engine_pulls={}), Lost.KEY),
        (lost("a/0", "b/0", sidecar_pulls=None, engine_pulls={}), Lost.HEADER_OR_KEY),
        (lost("a/0", "b/0", engine_pulls={"miss": 1.0}), Lost.TRANSFER),
        (lost("a/0", "b/0", sidecar_pulls=0.0, sidecar_drops={"unsigned": 1.0}), Lost.UNSIGNED),
        (pull("a/0", "b/0", fault="status 500"), Lost.REQUEST),
        (PullFacts("a/0", "b/0", external_tokens=400.0), Lost.NOWHERE),
        (PullFacts("a/0", "b/0", external_tokens=0.0), Lost.HEADER_OR_KEY),
        (PullFacts("a/0", "b/0"), Lost.UNKNOWN),
    ],
)
def test_a_pull_is_lost_at_the_first_place_that_did_not_see_it(fact: PullFacts, where: Lost) -> None:
    assert where_lost(fact) is where


@pytest.mark.parametrize(
    ("fact", "finding", "evidence", "remedy"),
    [
        (
            lost("a/0", "b/0", sidecar_pulls=0.0, engine_pulls={}, sidecar_drops={"signature_wrong": 1.0}),
            ("header through", "b/0"),
            "signature_wrong",
            "--routing-key-file",
        ),
        (
            lost("a/0", "b/0", sidecar_pulls=0.0, engine_pulls={}),
            ("header through", "b/0"),
            "not followed",
            "does not know this header",
        ),
        (lost("a/0", "b/0", engine_pulls={}), ("key names", "b/0"), "did not take it", "older ones: p2p"),
        (
            lost("a/0", "b/0", sidecar_pulls=None, engine_pulls={}),
            ("key names", "b/0"),
            "saw no pull",
            "--sidecar-metrics-port",
        ),
        (
            lost("a/0", "b/0", engine_pulls={"refused_auth": 1.0}),
            ("bytes moved", "b/0 <- a/0"),
            "refused_auth",
            "peer key",
        ),
        (
            lost("a/0", "b/0", engine_pulls={"miss": 1.0}, primed=False),
            ("bytes moved", "b/0 <- a/0"),
            "has not announced",
            "CPU tier",
        ),
        (pull("a/0", "b/0", fault="status 404"), ("bytes moved", "b/0 <- a/0"), "status 404", "--model"),
        (pull("a/0", "b/0", served_bytes=0.0), ("bytes moved", "b/0 <- a/0"), "none as served", "p2p_port"),
    ],
)
def test_a_lost_pull_is_a_finding_with_its_remedy(
    fact: PullFacts, finding: tuple[str, str], evidence: str, remedy: str
) -> None:
    facts = healthy(pulls=(fact,))
    assert faults(facts) == [finding]
    found = check(facts, finding[0]).findings[0]
    assert evidence in found.evidence
    assert remedy in found.remedy


def test_what_was_not_tried_is_not_called_good() -> None:
    facts = healthy(tokens=(), repeat=None, pulls=(), probed=False)
    names = {c.name for c in examine(facts) if c.verdict is Verdict.NOT_JUDGED}
    assert {"tokens equal", "scores", "header through", "bytes moved"} <= names
    assert faults(facts) == []
    unsigned = healthy(pulls=(lost("a/0", "b/0", sidecar_pulls=0.0, sidecar_drops={"unsigned": 1.0}),))
    assert check(unsigned, "header through").verdict is Verdict.NOT_JUDGED
    assert "--routing-key-file" in check(unsigned, "header through").seen


def test_pickers() -> None:
    silent = Facts((PickerFacts(URL, fault="Connection refused"),))
    assert faults(silent) == [("pickers", URL)]
    assert {c.verdict for c in examine(silent)[1:]} == {Verdict.NOT_JUDGED}
    empty = Facts((picker(),))
    assert faults(empty) == [("pickers", URL)]
    good = healthy().pickers[0]
    off = replace(good, thresholds={"configured": True, "active": False, "enabled": False})
    assert faults(replace(healthy(), pickers=(off,))) == []
    assert faults(replace(healthy(), pickers=(off,)), Verdict.WARNING) == [("pickers", URL)]
    bad = replace(good, thresholds={**good.thresholds, "rejected": "x.yaml: spec: unknown field"})
    assert faults(replace(healthy(), pickers=(bad,))) == [("pickers", URL)]
    unlike = replace(good, url="http://other", thresholds={**good.thresholds, "rules": [1]})
    assert faults(replace(healthy(), pickers=(good, unlike)), Verdict.WARNING) == [
        ("pickers", f"{URL}, http://other")
    ]


def test_a_replica_that_hears_nothing_is_found_although_another_one_does() -> None:
    good = healthy().pickers[0]
    deaf = replace(good, url="http://other", endpoints=(row("a/0"), row("b/0", state="unknown"), row("c/0")))
    facts = replace(healthy(), pickers=(good, deaf))
    assert faults(facts) == [("subscriptions", "b/0")]
    assert "http://other" in check(facts, "subscriptions").findings[0].evidence


def test_scores() -> None:
    unknown = RepeatFacts("http://gw", prompt_tokens=400, computing="a/0", repeats=20, reason="no_holder")
    assert faults(healthy(repeat=unknown)) == [("scores", "a/0")]
    untokenised = replace(unknown, prompt_tokens=None)
    assert faults(healthy(repeat=untokenised)) == [("scores", "http://gw")]
    assert faults(healthy(repeat=RepeatFacts("http://gw", fault="status 503"))) == [("scores", "http://gw")]
    deaf = healthy(repeat=unknown, rows={"a/0": row("a/0", state="unknown")})
    assert faults(deaf) == [("subscriptions", "a/0")], "what follows from it is not a second fault"


def test_a_request_that_a_mute_engine_may_have_had_does_not_blame_the_gateway() -> None:
    """A stopped engine was two faults: its own, and a gateway that was well."""
    mute = {"b/0": engine("b/0", fault="no answer within 5 s")}
    late = RepeatFacts("http://gw", fault="a request through it: no answer within 30 s", taken=True)
    assert faults(healthy(repeat=late, engines=mute)) == [("engines", "b/0")]
    assert "b/0" in check(healthy(repeat=late, engines=mute), "scores").seen
    assert faults(healthy(repeat=late)) == [("scores", "http://gw")], "nobody else can have been it"
    refused = RepeatFacts("http://gw", fault="a request through it: Connection refused")
    assert faults(healthy(repeat=refused, engines=mute)) == [("engines", "b/0"), ("scores", "http://gw")]


def test_a_picker_without_a_tokenizer_is_one_finding() -> None:
    no = tuple(
        TokenFacts(
            URL, name, "/v1/completions", None, None, False, "its tokens are not known", picker_fault=True
        )
        for name in ("a/0", "b/0", "c/0")
    )
    assert faults(healthy(tokens=no)) == [("tokens equal", URL)]


def test_clocks_and_shared_memory_warn_before_they_fail() -> None:
    slow = healthy(engines={"c/0": engine("c/0", sidecar_offset_s=-10.0)})
    assert faults(slow) == []
    assert faults(slow, Verdict.WARNING) == [("clocks", "c/0")]
    stale = healthy(engines={"c/0": engine("c/0", sidecar_drops={"signature_stale": 2.0})})
    assert faults(stale, Verdict.WARNING) == [("clocks", "c/0")]
    full = healthy(shm=ShmFacts("/dev/shm", 1 << 30, 1 << 20, ("vllm_offload_x.mmap",)))
    assert faults(full, Verdict.WARNING) == [("shared memory", "/dev/shm")] * 2
    assert not has_fault(examine(full))


def test_sources_that_no_sidecar_hears_of() -> None:
    engines = {name: engine(name, sidecar_pulls=0.0) for name in ("a/0", "b/0", "c/0")}
    facts = healthy(engines=engines, pulls=())
    assert faults(facts) == [("header through", "gateway")]


def test_report_says_the_same_as_text_and_as_json() -> None:
    checks = examine(healthy(rows={"c/0": row("c/0", info_seed_fp="\x1b[2Jt")}))
    text = list(lines(checks))
    assert len(text) == len(CHECKS) + 2
    assert text[-1].startswith("FAULT hash seeds: c/0: seed_fp is ")
    assert "To mend it: start every engine with the same PYTHONHASHSEED" in text[-1]
    assert "\x1b" not in "".join(text)
    document = json.loads(as_json(checks))
    assert document["healthy"] is False
    named = {c["name"]: c["findings"] for c in document["checks"]}
    assert named["hash seeds"][0]["place"] == "c/0"
    assert named["hash seeds"][0]["endpoints"] == ["c/0"]
