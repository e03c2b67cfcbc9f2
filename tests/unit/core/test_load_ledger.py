"""The ledger: derived from leases, so never negative and never leaking."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_plugin.identity import EndpointId
from epp.core.load_ledger import LoadLedger
from epp.core.types import NO_LOAD, InflightLoad

PODS = [EndpointId(p) for p in "abc"]
pods = st.sampled_from(PODS)


def test_prefill_is_released_at_first_token_and_decode_at_the_end() -> None:
    """S-D14."""
    ledger = LoadLedger()
    decode, prefill, source = PODS
    ledger.book("1", serving=decode, computing=prefill, source=source, uncached_prompt_tokens=900)
    assert ledger.load(prefill) == InflightLoad(1, 900, 0)
    assert ledger.load(decode) == InflightLoad(1, 0, 0)
    assert ledger.load(source) == InflightLoad(0, 0, 1)
    ledger.first_token("1")
    assert ledger.load(prefill) == ledger.load(source) == NO_LOAD
    assert ledger.load(decode) == InflightLoad(1, 0, 0)
    assert ledger.release("1")
    assert not ledger.release("1")
    assert ledger.load(decode) == NO_LOAD
    assert len(ledger) == 0


def test_a_decision_cannot_be_booked_twice() -> None:
    ledger = LoadLedger()
    ledger.book("1", serving=PODS[0], computing=PODS[0], source=None, uncached_prompt_tokens=1)
    with pytest.raises(ValueError, match="already booked"):
        ledger.book("1", serving=PODS[0], computing=PODS[0], source=None, uncached_prompt_tokens=1)


def test_a_pull_ends_once_at_whatever_comes_first() -> None:
    serving, source = PODS[0], PODS[2]
    ends = {
        "report": lambda ledger: ledger.pull_finished("1"),
        "first token": lambda ledger: ledger.first_token("1"),
        "end of stream": lambda ledger: ledger.release("1"),
        "its time": lambda ledger: ledger.expire_pulls(11.0),
    }
    for first in ends:
        ledger = LoadLedger()
        ledger.book(
            "1",
            serving=serving,
            computing=serving,
            source=source,
            uncached_prompt_tokens=7,
            pull_expires_at_s=11.0,
        )
        assert ledger.expire_pulls(10.9) == 0
        assert ledger.load(source).pulls_served == 1
        for name in (first, *ends):
            ends[name](ledger)
            assert ledger.load(source) == NO_LOAD, f"{first}, then {name}"
            ledger.check_integrity()


def test_the_end_of_a_pull_leaves_the_prefill_counted() -> None:
    ledger = LoadLedger()
    ledger.book("1", serving=PODS[0], computing=PODS[0], source=PODS[1], uncached_prompt_tokens=7)
    assert ledger.pull_finished("1")
    assert not ledger.pull_finished("1")
    assert not ledger.pull_finished("2")
    assert ledger.load(PODS[0]) == InflightLoad(1, 7, 0)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of bookings, first tokens and (repeated) releases against a naive list."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LoadLedger()
        self.open: dict[str, list[object]] = {}
        self.count = 0
        self.now_s = 0

    @rule(
        serving=pods,
        computing=pods,
        source=st.none() | pods,
        tokens=st.integers(0, 1000),
        keep_s=st.integers(0, 9),
    )
    def book(
        self, serving: EndpointId, computing: EndpointId, source: EndpointId | None, tokens: int, keep_s: int
    ) -> None:
        self.count += 1
        self.ledger.book(
            str(self.count),
            serving=serving,
            computing=computing,
            source=source,
            uncached_prompt_tokens=tokens,
            pull_expires_at_s=self.now_s + keep_s,
        )
        self.open[str(self.count)] = [serving, computing, source, tokens, True, self.now_s + keep_s]

    @rule(n=st.integers(0, 30))
    def first_token(self, n: int) -> None:
        self.ledger.first_token(str(n))
        if str(n) in self.open:
            self.open[str(n)][4] = False
            self.open[str(n)][5] = None

    @rule(n=st.integers(0, 30))
    def pull_finished(self, n: int) -> None:
        row = self.open.get(str(n), [None] * 6)
        pending = row[2] is not None and row[5] is not None
        assert self.ledger.pull_finished(str(n)) == pending
        row[5] = None

    @rule(passed_s=st.integers(0, 5))
    def time_passes(self, passed_s: int) -> None:
        self.now_s += passed_s
        due = [r for r in self.open.values() if r[5] is not None and r[5] <= self.now_s]  # type: ignore[operator]
        assert self.ledger.expire_pulls(self.now_s) == sum(r[2] is not None for r in due)
        for row in due:
            row[5] = None

    @rule(n=st.integers(0, 30))
    def release(self, n: int) -> None:
        assert self.ledger.release(str(n)) == (self.open.pop(str(n), None) is not None)

    @invariant()
    def equals_the_naive_count(self) -> None:
        self.ledger.check_integrity()
        for pod in PODS:
            rows = self.open.values()
            requests = sum((s == pod) + (c == pod and c != s and p) for s, c, _, _, p, _ in rows)  # type: ignore[misc]
            tokens = sum(t for s, c, _, t, p, _ in rows if c == pod and p)  # type: ignore[misc]
            pulls = sum(1 for _, _, k, _, _, pull in rows if k == pod and pull is not None)
            assert self.ledger.load(pod) == InflightLoad(requests, tokens, pulls)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
