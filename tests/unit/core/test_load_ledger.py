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


class LedgerMachine(RuleBasedStateMachine):
    """Any order of bookings, first tokens and (repeated) releases against a naive list."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LoadLedger()
        self.open: dict[str, list[object]] = {}
        self.count = 0

    @rule(serving=pods, computing=pods, source=st.none() | pods, tokens=st.integers(0, 1000))
    def book(
        self, serving: EndpointId, computing: EndpointId, source: EndpointId | None, tokens: int
    ) -> None:
        self.count += 1
        self.ledger.book(
            str(self.count),
            serving=serving,
            computing=computing,
            source=source,
            uncached_prompt_tokens=tokens,
        )
        self.open[str(self.count)] = [serving, computing, source, tokens, True]

    @rule(n=st.integers(0, 30))
    def first_token(self, n: int) -> None:
        self.ledger.first_token(str(n))
        if str(n) in self.open:
            self.open[str(n)][4] = False

    @rule(n=st.integers(0, 30))
    def release(self, n: int) -> None:
        assert self.ledger.release(str(n)) == (self.open.pop(str(n), None) is not None)

    @invariant()
    def equals_the_naive_count(self) -> None:
        self.ledger.check_integrity()
        for pod in PODS:
            rows = self.open.values()
            requests = sum((s == pod) + (c == pod and c != s and p) for s, c, _, _, p in rows)  # type: ignore[misc]
            tokens = sum(t for s, c, _, t, p in rows if c == pod and p)  # type: ignore[misc]
            pulls = sum(1 for _, _, k, _, p in rows if k == pod and p)
            assert self.ledger.load(pod) == InflightLoad(requests, tokens, pulls)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
