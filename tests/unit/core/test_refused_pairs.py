"""Refused pairs: held back while it is fresh, never for ever, bounded."""

from __future__ import annotations

from engine_plugin.identity import EndpointId
from epp.core.refused_pairs import BUSY_HOLD_S, HOLD_S, MAX_PEERS, RefusedPairs

A = EndpointId("a")


def test_a_rise_holds_a_peer_back_and_a_standing_counter_does_not() -> None:
    refusals = RefusedPairs()
    refusals.observe(A, {("x", "seed_fp"): 1.0}, 0.0)
    assert refusals.refused_by(A, HOLD_S - 0.1) == {"x"}
    refusals.observe(A, {("x", "seed_fp"): 1.0}, 30.0)
    assert refusals.refused_by(A, HOLD_S) == frozenset()
    refusals.observe(A, {("x", "seed_fp"): 2.0}, 61.0)
    assert refusals.refused_by(A, 61.0 + HOLD_S - 0.1) == {"x"}
    assert refusals.refused_by(EndpointId("b"), 61.0) == frozenset()


def test_a_busy_peer_is_held_back_for_a_moment_only() -> None:
    refusals = RefusedPairs()
    refusals.observe(A, {("x", "limit"): 5.0}, 0.0)
    assert refusals.refused_by(A, BUSY_HOLD_S - 0.1) == {"x"}
    assert refusals.refused_by(A, BUSY_HOLD_S) == frozenset()
    refusals.observe(A, {("x", "limit"): 6.0, ("x", "auth"): 1.0}, 3.0)
    refusals.observe(A, {("x", "limit"): 7.0, ("x", "auth"): 1.0}, 4.0)
    assert refusals.refused_by(A, 62.0) == {"x"}, "the longer hold stays"


def test_a_counter_that_falls_is_another_engines() -> None:
    refusals = RefusedPairs()
    refusals.observe(A, {("x", "auth"): 3.0, ("y", "auth"): 1.0}, 0.0)
    refusals.observe(A, {("y", "auth"): 1.0}, 1.0)
    assert refusals.refused_by(A, 1.0) == {"y"}
    refusals.observe(A, {}, 2.0)
    assert refusals.refused_by(A, 2.0) == frozenset()


def test_what_one_engine_can_fill_is_bounded() -> None:
    refusals = RefusedPairs()
    refusals.observe(A, {(f"p{i}", "auth"): 1.0 for i in range(MAX_PEERS * 2)}, 0.0)
    assert len(refusals.refused_by(A, 0.0)) == MAX_PEERS
