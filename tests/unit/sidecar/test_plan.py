"""The plan of a request: a table of headers against legs, and the reason of every dropped header."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from sidecar import wire
from sidecar.allowlist import AllowList
from sidecar.endpoint import HostPort
from sidecar.endpoint_file import EndpointRow
from sidecar.plan import (
    Aggregated,
    Connector,
    Dropped,
    Facts,
    ForwardPlan,
    Peer,
    PeerLeg,
    PrefillDecode,
    Refused,
    RoutingRules,
    Self,
    plan_request,
)
from sidecar.routing_auth import RoutingAuth

PREFILL, SOURCE, RANK = wire.PREFILLER_HOST_PORT, wire.KV_CACHE_SOURCE_HOST_PORT, wire.DATA_PARALLEL_HOST_PORT
OWN, A, B, C = (f"127.0.1.{n}:8000" for n in (1, 2, 3, 4))
DECODER = "127.0.1.5:8000"
STRANGER = "127.0.9.9:8000"


def _row(address: str, p2p_port: int, role: str | None = None) -> EndpointRow:
    host, port = address.split(":")
    labels = {"llm-d.ai/role": role} if role else {}
    return EndpointRow(host, 0, host, int(port), int(port), 5557, 5657, p2p_port, labels)


ROWS = (
    _row(OWN, 7001),
    _row(A, 7002, "prefill"),
    _row(B, 7003, "both"),
    _row(C, 7004),
    _row(DECODER, 7005, "decode"),
)
MEMBERS = AllowList(ROWS)
OPEN = AllowList(ROWS, enforced=False)
RULES = RoutingRules(Connector.OFFLOADING, True, 7777, 8000, 4)
FACTS = Facts(RoutingAuth.OFF, generates=True, from_peer=False)


@dataclass
class Case:
    """Arguments of `plan_request` with the usual values filled in."""

    facts: Facts = FACTS
    own: Self = Self("127.0.1.1", 0)  # noqa: RUF009 - frozen
    rules: RoutingRules = RULES
    members: AllowList = MEMBERS

    def plan(self, *headers: tuple[str, str]) -> ForwardPlan:
        return plan_request(
            CIMultiDict(headers),
            self.facts,
            self.own,
            self.rules,
            self.members,
            lambda given: given or "fresh",
        )


def _peer(address: str, p2p_port: int, rank: int = 0) -> Peer:
    return Peer(HostPort.parse(address), p2p_port, rank)


def _reasons(plan: ForwardPlan) -> list[tuple[str, str]]:
    return [(drop.header, drop.reason) for drop in plan.dropped]


# --- aggregated ---------------------------------------------------------------------------------


def test_nothing_named_is_one_plain_leg() -> None:
    assert Case().plan() == Aggregated(0)


def test_a_source_is_pulled_from_at_its_rows_p2p_port() -> None:
    plan = Case().plan((SOURCE, f" {A} "), (wire.DECISION_ID, "decision"))
    assert plan == Aggregated(0, _peer(A, 7002), "decision")


def test_header_names_have_no_case() -> None:
    assert Case().plan((SOURCE.title(), A)) == Aggregated(0, _peer(A, 7002), "fresh")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([STRANGER], "not_allowed"),
        (["127.0.1.2:22"], "not_allowed"),
        (["127.0.1.2:9090"], "not_allowed"),
        (["127.0.1.2"], "malformed"),
        (["engine-a:8000"], "malformed"),
        (["http://127.0.1.2:8000"], "malformed"),
        ([OWN], "source_is_computing"),
        (["[::ffff:127.0.1.1]:8000"], "source_is_computing"),
        ([f"{A},{B}"], "ambiguous"),
        ([A, B], "ambiguous"),
    ],
)
def test_a_source_that_is_dropped(values: Sequence[str], reason: str) -> None:
    assert Case().plan(*((SOURCE, value) for value in values)) == Aggregated(
        0, dropped=(Dropped(SOURCE, reason),)
    )


def test_a_connector_that_cannot_pull_drops_the_source() -> None:
    rules = replace(RULES, connector=Connector.NIXLV2, pull_enabled=False)
    assert _reasons(Case(rules=rules).plan((SOURCE, A))) == [(SOURCE, "pull_disabled")]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.9.9:8000", _peer("127.0.9.9:8000", 7777)),
        ("127.0.9.9:8003", _peer("127.0.9.9:8003", 7780, rank=3)),
        (A, _peer(A, 7002)),
        ("127.0.9.9:8004", None),
        ("127.0.9.9:7999", None),
    ],
)
def test_without_protection_an_absent_row_leaves_arithmetic(address: str, expected: Peer | None) -> None:
    plan = Case(members=OPEN).plan((SOURCE, address))
    assert isinstance(plan, Aggregated)
    assert plan.source == expected
    assert _reasons(plan) == ([] if expected else [(SOURCE, "rank_out_of_range")])


# --- prefill/decode -----------------------------------------------------------------------------


def test_a_prefiller_splits_the_request() -> None:
    assert Case().plan((PREFILL, A)) == PrefillDecode(0, (_peer(A, 7002),), None, "fresh")


def test_under_p_d_the_source_belongs_to_the_prefiller() -> None:
    plan = Case().plan((PREFILL, A), (SOURCE, OWN))
    assert isinstance(plan, PrefillDecode)
    assert plan.source_for(plan.prefillers[0]) == _peer(OWN, 7001)


def test_a_prefiller_never_pulls_from_itself() -> None:
    plan = Case().plan((PREFILL, f"{A},{B}"), (SOURCE, A))
    assert isinstance(plan, PrefillDecode)
    assert [plan.source_for(peer) for peer in plan.prefillers] == [None, _peer(A, 7002)]
    assert _reasons(plan) == [(SOURCE, "source_is_computing")]


def test_the_prefiller_may_be_this_endpoint() -> None:
    plan = Case().plan((PREFILL, OWN), (SOURCE, A))
    assert plan == Aggregated(0, _peer(A, 7002), "fresh", (Dropped(PREFILL, "prefiller_is_self"),))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (STRANGER, "not_allowed"),
        ("127.0.1.2:22", "not_allowed"),
        (DECODER, "wrong_role"),
        ("169.254.169.254:80", "not_allowed"),
        ("x", "malformed"),
    ],
)
def test_a_prefiller_that_is_refused(value: str, reason: str) -> None:
    plan = Case().plan((PREFILL, value), (SOURCE, A))
    assert isinstance(plan, Refused)
    assert _reasons(plan) == [(PREFILL, reason)]
    assert reason in plan.message


def test_an_endpoint_without_a_role_may_prefill() -> None:
    assert isinstance(Case().plan((PREFILL, C)), PrefillDecode)


def test_of_a_list_the_allowed_ones_are_kept_in_order() -> None:
    plan = Case().plan((PREFILL, f"{B}, {STRANGER}"), (PREFILL, f"{A},{B}"))
    assert isinstance(plan, PrefillDecode)
    assert plan.prefillers == (_peer(B, 7003), _peer(A, 7002))
    assert _reasons(plan) == [(PREFILL, "not_allowed")]


def test_sampling_starts_anywhere_and_is_the_same_for_one_request() -> None:
    case = Case(rules=replace(RULES, sample_prefiller=True))
    firsts = set()
    for n in range(40):
        headers = ((PREFILL, f"{A},{B},{C}"), (wire.REQUEST_ID, f"req-{n}"))
        plan = case.plan(*headers)
        assert plan == case.plan(*headers)
        assert isinstance(plan, PrefillDecode)
        assert {str(peer.serving) for peer in plan.prefillers} == {A, B, C}
        firsts.add(plan.prefillers[0])
    assert len(firsts) == 3


def test_the_number_of_prefillers_is_bounded() -> None:
    listed = ",".join(f"127.0.9.{n}:8000" for n in range(1, 100))
    plan = Case(members=OPEN).plan((PREFILL, listed))
    assert isinstance(plan, PrefillDecode)
    assert len(plan.prefillers) == 8


# --- ranks --------------------------------------------------------------------------------------


def test_the_older_data_parallel_header_chooses_a_rank_of_this_pod() -> None:
    assert Case().plan((RANK, "127.0.1.1:8002")) == Aggregated(2)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("127.0.1.2:8002", "not_this_pod"), ("127.0.1.1:8004", "rank_out_of_range"), ("8002", "malformed")],
)
def test_any_other_rank_is_not_mapped_to_rank_0(value: str, reason: str) -> None:
    plan = Case(own=Self("127.0.1.1", 3)).plan((RANK, value))
    assert plan == Aggregated(3, dropped=(Dropped(RANK, reason),))


def test_a_pull_from_another_rank_of_this_pod_is_not_a_pull_from_oneself() -> None:
    rank_1 = "127.0.1.1:8001"
    members = AllowList([_row(OWN, 7001), _row(rank_1, 7011)])
    assert Case(members=members).plan((SOURCE, rank_1)) == Aggregated(0, _peer(rank_1, 7011), "fresh")
    on_rank_1 = Case(members=members).plan((SOURCE, rank_1), (RANK, rank_1))
    assert on_rank_1 == Aggregated(1, dropped=(Dropped(SOURCE, "source_is_computing"),))


# --- who may say so -----------------------------------------------------------------------------


@pytest.mark.parametrize("auth", [auth for auth in RoutingAuth if not auth.trusted])
def test_without_a_valid_signature_every_routing_header_is_void(auth: RoutingAuth) -> None:
    plan = Case(replace(FACTS, auth=auth)).plan((PREFILL, STRANGER), (SOURCE, A), (RANK, "127.0.1.1:8001"))
    assert plan == Aggregated(0, dropped=tuple(Dropped(name, auth) for name in (PREFILL, SOURCE, RANK)))


def test_other_routes_have_no_legs_to_rewrite() -> None:
    plan = Case(replace(FACTS, generates=False)).plan((PREFILL, A), (SOURCE, A))
    assert plan == Aggregated(
        0, dropped=(Dropped(PREFILL, "not_generating"), Dropped(SOURCE, "not_generating"))
    )


def test_a_leg_of_a_peer_is_passed_on() -> None:
    case = Case(replace(FACTS, from_peer=True, auth=RoutingAuth.WRONG))
    assert case.plan((wire.LEG, wire.LEG_PREFILL), (SOURCE, A)) == PeerLeg(0)


def test_a_leg_header_of_anybody_else_is_dropped() -> None:
    plan = Case().plan((wire.LEG, wire.LEG_PREFILL), (SOURCE, A))
    assert plan == Aggregated(0, _peer(A, 7002), "fresh", (Dropped(wire.LEG, "not_from_peer"),))


def test_encoders_are_not_supported() -> None:
    assert _reasons(Case().plan((wire.ENCODER_HOSTS_PORTS, A))) == [(wire.ENCODER_HOSTS_PORTS, "unsupported")]


_ADDRESSES = (
    st.sampled_from([OWN, A, B, C, DECODER, STRANGER, "127.0.1.2:22", "", "x", "[::1]:80"]) | st.text()
)


@given(st.lists(st.tuples(st.sampled_from(wire.ROUTING_HEADERS), _ADDRESSES), max_size=6), st.booleans())
def test_no_header_leads_outside_the_pool_or_to_oneself(
    headers: list[tuple[str, str]], generates: bool
) -> None:
    plan = Case(replace(FACTS, generates=generates)).plan(*headers)
    named = [plan.source] if isinstance(plan, Aggregated) else []
    if isinstance(plan, PrefillDecode):
        named = [*plan.prefillers, *(plan.source_for(peer) for peer in plan.prefillers)]
        assert all(peer != plan.source_for(peer) for peer in plan.prefillers)
        assert OWN not in {str(peer.serving) for peer in plan.prefillers}
    elif isinstance(plan, Aggregated) and plan.source:
        assert str(plan.source.serving) != OWN
    for peer in named:
        assert peer is None or MEMBERS.find(peer.serving) is not None
