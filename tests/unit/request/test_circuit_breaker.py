"""The breaker's cases on a clock of its own."""

from __future__ import annotations

from epp.request.circuit_breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S, CircuitBreaker


def opened(now_s: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.admits(now_s)
        breaker.failed(now_s)
    return breaker


def test_only_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.is_open
    assert opened().is_open


def test_one_probe_a_pause_and_longer_pauses() -> None:
    breaker, now_s, pause_s = opened(), 0.0, FIRST_PAUSE_S
    for _ in range(10):
        assert not breaker.admits(now_s + pause_s * 0.99)
        now_s += pause_s
        assert breaker.admits(now_s)
        assert not breaker.admits(now_s), "one probe"
        breaker.failed(now_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
    assert pause_s == MAX_PAUSE_S


def test_a_good_probe_closes_it_for_good() -> None:
    breaker = opened()
    assert breaker.admits(FIRST_PAUSE_S)
    breaker.succeeded()
    assert breaker.admits(FIRST_PAUSE_S)
    breaker.failed(FIRST_PAUSE_S)
    assert not breaker.is_open, "counting starts anew"


def test_a_probe_that_never_reports_blocks_one_pause_only() -> None:
    breaker = opened()
    assert breaker.admits(FIRST_PAUSE_S)
    assert not breaker.admits(1.5 * FIRST_PAUSE_S)
    assert breaker.admits(2 * FIRST_PAUSE_S)
