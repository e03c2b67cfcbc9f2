"""The source rule, clause by clause. A property test each, so that breaking a clause breaks its test."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epp.core.kv_source import choose_source, sampling_coordinate
from epp.core.source_band import Selection
from epp.core.thresholds import NO_THRESHOLDS, PolicyTable, PullSettings, SourcePolicy, everywhere
from epp.core.types import MAX_RECORDED, Candidate, ClaimState, EngineInfo, SourceReason
from tests.unit.core.naive_band import naive_band
from tests.unit.core.rows import BLOCK, candidate, info, request

ON = SourcePolicy(configured=True, min_cached_token_delta=1)
ids = st.text(st.characters(codec="utf-8"), max_size=40)
depth = st.integers(0, 200)


def delta(blocks: int) -> SourcePolicy:
    return SourcePolicy(configured=True, min_cached_token_delta=blocks * BLOCK)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0x811C9DC5), ("a", 0xE40C292C), ("foobar", 0xBF9CF968)],  # published FNV-1a 32 vectors
)
def test_coordinate_is_fnv_1a_32(text: str, value: int) -> None:
    assert sampling_coordinate(text) == value / 2**32


@given(st.lists(depth, min_size=2, max_size=8), ids)
def test_only_holders_within_one_block_of_the_best_are_sampled(depths: list[int], rid: str) -> None:
    rows = [candidate(f"e{i}", blocks=d) for i, d in enumerate(depths)]
    choice = choose_source(request(rid), rows, candidate("z"), ON)
    best = max(depths)
    if choice.source is not None:
        assert choice.source.servable_tokens >= (best - 1) * BLOCK
        in_band = {r.endpoint.id for r, d in zip(rows, depths, strict=True) if d and d + 1 >= best}
        assert {row[0] for row in choice.considered} == in_band
    else:
        assert best == 0


@given(depth, depth, depth)
def test_only_the_cpu_prefix_of_a_holder_counts(cpu: int, device: int, local: int) -> None:
    holder = candidate("a", blocks=max(cpu, device), cpu=cpu, device=device)
    choice = choose_source(request(), [holder], candidate("b", blocks=local), ON)
    if cpu > local:
        assert choice.source is not None
        assert choice.source.gain_tokens == (cpu - local) * BLOCK
    else:
        assert choice.source is None


@given(depth, depth)
def test_all_tiers_of_the_computing_endpoint_count(device: int, cpu: int) -> None:
    computing = candidate("b", blocks=max(device, cpu), device=device, cpu=cpu)
    choice = choose_source(request(), [candidate("a", blocks=100)], computing, delta(1))
    assert (choice.reason is SourceReason.PULL) == (100 - max(device, cpu) >= 1)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 60))
def test_gain_must_reach_the_delta_in_tokens(source: int, local: int, needed: int) -> None:
    choice = choose_source(
        request(), [candidate("a", blocks=source)], candidate("b", blocks=local), delta(needed)
    )
    assert (choice.source is not None) == (source > 0 and source - local >= needed)
    if choice.source is None and source > 0:
        assert choice.reason is SourceReason.BELOW_DELTA


def test_sampling_follows_one_over_one_plus_waiting() -> None:
    rows = [candidate("a", blocks=100, waiting=7), candidate("b", blocks=100, waiting=0)]
    picked = Counter(
        str(choose_source(request(f"req-{i}"), rows, candidate("c"), ON).source.endpoint.id.pod)  # type: ignore[union-attr]
        for i in range(4000)
    )
    assert picked["a"] / 4000 == pytest.approx((1 / 8) / (1 + 1 / 8), abs=0.02)
    assert choose_source(request(), rows, candidate("c"), ON).considered == (
        (rows[0].endpoint.id, 1600, 1 / 8),
        (rows[1].endpoint.id, 1600, 1.0),
    )


def test_unknown_waiting_counts_as_zero_as_in_the_reference() -> None:
    rows = [candidate("a", blocks=9, waiting=None)]
    assert choose_source(request(), rows, candidate("b"), ON).considered[0][2] == 1.0


@given(depth, ids)
def test_never_itself(blocks: int, rid: str) -> None:
    me = candidate("a", blocks=blocks)
    choice = choose_source(request(rid), [me, candidate("b", blocks=blocks)], me, ON)
    assert choice.source is None or choice.source.endpoint.id != me.endpoint.id


@given(st.integers(1, 200), ids)
def test_holders_that_tie_with_the_computing_endpoint_stay_local(blocks: int, rid: str) -> None:
    me = candidate("a", blocks=blocks)
    choice = choose_source(request(rid), [me, candidate("b", blocks=blocks)], me, ON)
    assert choice.source is None
    assert choice.reason in (SourceReason.LOCAL_BEST, SourceReason.BELOW_DELTA)


@pytest.mark.parametrize("state", [ClaimState.UNKNOWN, ClaimState.SYNCING])
def test_no_claim_no_source_and_no_blind_pull(state: ClaimState) -> None:
    blind = candidate("b", blocks=5, state=state)
    holder = candidate("a", blocks=50, state=state)
    assert choose_source(request(), [holder, blind], blind, ON).reason is SourceReason.NO_CLAIM
    live = candidate("a", blocks=50)
    assert choose_source(request(), [live, blind], blind, ON).reason is SourceReason.DESTINATION_UNKNOWN
    assert choose_source(request(), [holder], candidate("c"), ON).source is None


def test_a_partial_claim_is_a_lower_bound_that_may_serve() -> None:
    partial = candidate("a", blocks=50, state=ClaimState.PARTIAL)
    assert choose_source(request(), [partial], candidate("b"), ON).reason is SourceReason.PULL


def test_draining_holders_serve_nobody() -> None:
    rows = [candidate("a", blocks=50, draining=True)]
    choice = choose_source(request(), rows, candidate("b"), ON)
    assert choice.reason is SourceReason.DRAINING
    assert choice.refused == ((rows[0].endpoint.id, SourceReason.DRAINING),)


@pytest.mark.parametrize(
    "field", ["protocol", "block_size_tokens", "hash_algo", "seed_fp", "model_fp", "layout_fp"]
)
def test_a_known_mismatch_is_never_named(field: str) -> None:
    wrong = info(**{field: 99 if field == "block_size_tokens" else "other"})
    rows = [candidate("a", blocks=50, engine=wrong)]
    choice = choose_source(request(), rows, candidate("b", engine=info()), ON)
    assert choice.reason is SourceReason.INCOMPATIBLE
    rows.append(candidate("c", blocks=20, engine=info()))
    choice = choose_source(request(), rows, candidate("b", engine=info()), ON)
    assert choice.source is not None
    assert choice.source.endpoint.id.pod == "c"


def test_unverified_engines_are_named_unless_refused() -> None:
    rows = [candidate("a", blocks=50)]
    assert choose_source(request(), rows, candidate("b", engine=info()), ON).reason is SourceReason.PULL
    strict = SourcePolicy(configured=True, min_cached_token_delta=1, require_verified=True)
    refused = choose_source(request(), rows, candidate("b", engine=info()), strict)
    assert refused.reason is SourceReason.UNVERIFIED


def test_off_by_default_and_why() -> None:
    rows, here = [candidate("a", blocks=50)], candidate("b")
    one = everywhere(PullSettings(min_cached_token_delta=1))
    off = PolicyTable(None, configured=False, thresholds=one).policy_for()
    assert choose_source(request(), rows, here, off).reason is SourceReason.NOT_CONFIGURED
    unset = PolicyTable(None, configured=True, thresholds=NO_THRESHOLDS).policy_for()
    assert choose_source(request(), rows, here, unset).reason is SourceReason.NO_THRESHOLD
    disabled = PolicyTable(
        1, configured=True, thresholds=everywhere(PullSettings(enabled=False))
    ).policy_for()
    assert choose_source(request(), rows, here, disabled).reason is SourceReason.SWITCHED_OFF
    assert choose_source(request(tokens=None), rows, here, ON).reason is SourceReason.NO_TOKENS


def test_thresholds_override_the_producers_delta() -> None:
    stricter = everywhere(PullSettings(min_cached_token_delta=51 * BLOCK), generation=7)
    policy = PolicyTable(1, configured=True, thresholds=stricter).policy_for()
    choice = choose_source(request(), [candidate("a", blocks=50)], candidate("b"), policy)
    assert choice.reason is SourceReason.BELOW_DELTA
    assert (choice.min_cached_token_delta, choice.generation) == (51 * BLOCK, 7)


# --- ours on top of the reference -------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_source_at_its_limit_is_not_named(pulls: int, limit: int) -> None:
    policy = replace(ON, max_inflight_pulls=limit)
    choice = choose_source(request(), [candidate("a", blocks=9, pulls=pulls)], candidate("b"), policy)
    assert choice.reason is (SourceReason.PULL if pulls < limit else SourceReason.OVER_LIMIT)


@given(ids)
def test_a_refused_pair_is_not_named_and_the_next_best_is(rid: str) -> None:
    bad = candidate("a", blocks=50, engine=info(instance="bad", p2p_addr="10.0.0.1:7777"))
    rows, here = [bad, candidate("c", blocks=20)], candidate("b")
    for name in ("bad", "10.0.0.1:7777"):
        choice = choose_source(request(rid), rows, here, ON, frozenset({name}))
        assert choice.source is not None
        assert choice.source.endpoint.id.pod == "c"
        assert choice.refused == ((bad.endpoint.id, SourceReason.PEER_REFUSED),)
        alone = choose_source(request(rid), rows[:1], here, ON, frozenset({name}))
        assert alone.reason is SourceReason.PEER_REFUSED
    other = choose_source(request(rid), rows, here, ON, frozenset({"else", ""}))
    assert other.source is not None
    assert other.source.endpoint == bad.endpoint


def test_a_known_mismatch_is_said_rather_than_that_the_engines_have_met_it() -> None:
    row = candidate("a", blocks=50, engine=info(instance="bad", seed_fp="other"))
    choice = choose_source(request(), [row], candidate("b", engine=info()), ON, frozenset({"bad"}))
    assert choice.reason is SourceReason.INCOMPATIBLE


def test_a_stock_engine_is_refused_by_the_address_of_its_row() -> None:
    row = candidate("a", blocks=50)
    row = row._replace(endpoint=replace(row.endpoint, p2p_address="10.0.0.1:7777"))
    choice = choose_source(request(), [row], candidate("b"), ON, frozenset({"10.0.0.1:7777"}))
    assert choice.reason is SourceReason.PEER_REFUSED


def test_the_reason_is_the_deepest_holders() -> None:
    rows = [
        candidate("a", blocks=10, draining=True),
        candidate("b", blocks=30, engine=info(seed_fp="other")),
        candidate("c", blocks=20, engine=info(), pulls=1),
    ]
    policy = replace(ON, max_inflight_pulls=1)
    choice = choose_source(request(), rows, candidate("z", engine=info()), policy)
    assert choice.reason is SourceReason.INCOMPATIBLE
    assert [(str(e), r.value) for e, r in choice.refused] == [
        ("b/0", "incompatible"),
        ("c/0", "over_limit"),
        ("a/0", "draining"),
    ]


@given(st.integers(0, 20), st.integers(0, 20))
def test_outstanding_pulls_weigh_like_waiting_requests(waiting: int, pulls: int) -> None:
    rows = [candidate("a", blocks=9, waiting=float(waiting), pulls=pulls)]
    aware = choose_source(request(), rows, candidate("b"), ON)
    assert aware.considered[0][2] == 1 / (1 + waiting + pulls)
    blind = choose_source(request(), rows, candidate("b"), replace(ON, inflight_awareness=False))
    assert blind.considered[0][2] == 1 / (1 + waiting)


def test_a_source_class_has_terms_of_its_own() -> None:
    far = candidate("a", blocks=50, source_class="far")
    near = candidate("c", blocks=50, source_class="near", pulls=2)
    computing = candidate("b", blocks=10)
    terms = {
        "delta": replace(ON, min_cached_token_delta=41 * BLOCK),
        "off": replace(ON, enabled=False),
        "limit": replace(ON, max_inflight_pulls=0),
        "verified": replace(ON, require_verified=True),
    }
    reasons = {
        "delta": SourceReason.BELOW_DELTA,
        "off": SourceReason.SWITCHED_OFF,
        "limit": SourceReason.OVER_LIMIT,
        "verified": SourceReason.UNVERIFIED,
    }
    for name, far_terms in terms.items():
        policy = replace(ON, by_class={"far": far_terms})
        picked = {
            choose_source(request(f"r{i}"), [far, near], computing, policy).source.endpoint.id.pod  # type: ignore[union-attr]
            for i in range(40)
        }
        assert picked == {"c"}, name
        assert choose_source(request(), [far], computing, policy).reason is reasons[name]
    blind = replace(ON, by_class={"near": replace(ON, inflight_awareness=False)})
    weights = {e.pod: w for e, _, w in choose_source(request(), [far, near], computing, blind).considered}
    assert weights == {"a": 1.0, "c": 1.0}


def test_a_class_can_be_on_where_everything_else_is_off() -> None:
    rows = [candidate("a", blocks=60), candidate("c", blocks=50, source_class="near")]
    general = replace(ON, enabled=False)
    policy = replace(general, by_class={"near": replace(ON, min_cached_token_delta=5 * BLOCK)})
    choice = choose_source(request(), rows, candidate("b"), policy)
    assert choice.source is not None
    assert (choice.source.endpoint.id.pod, choice.min_cached_token_delta) == ("c", 5 * BLOCK)
    assert choice.refused == ((rows[0].endpoint.id, SourceReason.SWITCHED_OFF),)


def test_a_record_is_cut_but_never_loses_the_sampled_holder() -> None:
    rows = [candidate(f"e{i:03d}", blocks=100 + i % 2) for i in range(300)]
    for number in range(50):
        choice = choose_source(request(f"r{number}"), rows, candidate("z"), ON)
        assert choice.source is not None
        assert (choice.band_size, choice.holders_total) == (300, 300)
        assert len(choice.considered) == len(choice.holders) == MAX_RECORDED
        assert choice.source.endpoint.id in {e for e, _, _ in choice.considered}
        assert {c.match.cpu_blocks for c in choice.holders} == {101}


# --- one loop over all of them comes to what judging each one comes to -------------------------------

_INFOS = (None, info(), info(seed_fp="other"), info(instance="met"), info(p2p_addr="10.0.0.9:7777"))
_row = st.builds(
    lambda n, blocks, waiting, pulls, engine, draining, kind, size: candidate(
        f"e{n:02d}",
        blocks=blocks,
        waiting=waiting,
        pulls=pulls,
        engine=engine,
        draining=draining,
        source_class=kind,
        block_tokens=size,
    ),
    st.integers(0, 30),
    st.integers(0, 12),
    st.sampled_from([None, 0.0, 1.0, 3.0]),
    st.integers(0, 3),
    st.sampled_from(_INFOS),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([None, "near", "far", "else"]),
    st.sampled_from([BLOCK, BLOCK, BLOCK, 2 * BLOCK]),
)
_terms = st.builds(
    lambda enabled, least, aware, verified, limit, mode: replace(
        ON,
        enabled=enabled,
        min_cached_token_delta=least,
        inflight_awareness=aware,
        require_verified=verified,
        max_inflight_pulls=limit,
        mode=mode,
    ),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([None, 1, 4 * BLOCK, 9 * BLOCK]),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(0, 3),
    st.sampled_from(["threshold", "cost"]),
)
_policy = st.builds(
    lambda general, by_class: replace(general, by_class=by_class),
    _terms,
    st.dictionaries(st.sampled_from(["near", "far"]), _terms),
)


@given(
    st.lists(_row, min_size=1, max_size=14, unique_by=lambda c: c.endpoint.id),
    st.sampled_from(_INFOS),
    _policy,
    st.sampled_from(
        [frozenset(), frozenset({"met"}), frozenset({"10.0.0.9:7777", ""}), frozenset({"nobody"})]
    ),
    st.booleans(),
)
def test_the_band_is_that_of_judging_every_holder_by_itself(
    rows: list[Candidate], engine: EngineInfo | None, policy: SourcePolicy, peers: frozenset[str], among: bool
) -> None:
    assume(any(c.match.cpu_blocks for c in rows))
    rows.sort(key=lambda c: c.endpoint.id)
    here = candidate(rows[0].endpoint.id.pod if among else "z", blocks=2, engine=engine)
    selection = Selection(rows, [c.match.servable_tokens for c in rows], here, policy, peers)
    band = selection.band()
    found = [(c.endpoint.id, weight) for c, weight in zip(band.rows, band.weights, strict=True)]
    expected, refused = naive_band(rows, here, policy, peers)
    assert found == expected
    assert list(selection.refused) == refused[:MAX_RECORDED]


def test_a_burst_between_two_scrapes_does_not_herd() -> None:
    """Eight equal holders, one of them with the shortest queue; 64 pulls before the next scrape."""

    def burst(policy: SourcePolicy) -> Counter[str]:
        served: Counter[str] = Counter()
        for number in range(64):
            rows = [
                candidate(pod, blocks=50, waiting=0.0 if pod == "a" else 4.0, pulls=served[pod])
                for pod in "abcdefgh"
            ]
            source = choose_source(request(f"burst-{number}"), rows, candidate("z"), policy).source
            assert source is not None
            served[source.endpoint.id.pod] += 1
        return served

    blind = burst(replace(ON, inflight_awareness=False))
    aware = burst(ON)
    assert blind["a"] > 64 * 0.3, "every request prefers the queue that was short a scrape ago"
    assert aware["a"] <= 64 * 0.2
    assert max(aware.values()) < max(blind.values())
