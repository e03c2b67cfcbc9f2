"""A histogram that is read in two ways: buckets, and the values since the last look."""

from __future__ import annotations

from engine_plugin.transport.stats import DURATION_BOUNDS_S, MAX_FRESH, Durations


def test_a_duration_is_counted_under_the_first_bound_that_holds_it() -> None:
    durations = Durations()
    for seconds in (DURATION_BOUNDS_S[0], DURATION_BOUNDS_S[0] * 1.01, DURATION_BOUNDS_S[-1] + 1):
        durations.add(seconds)
    assert durations.counts == [1, 1, *[0] * (len(DURATION_BOUNDS_S) - 2), 1]
    assert durations.total_s == DURATION_BOUNDS_S[0] * 2.01 + DURATION_BOUNDS_S[-1] + 1


def test_values_are_taken_once_and_never_pile_up() -> None:
    durations = Durations()
    durations.add(0.5)
    assert (durations.take(), durations.take()) == ([0.5], [])
    for number in range(MAX_FRESH + 3):
        durations.add(float(number))
    taken = durations.take()
    assert (len(taken), taken[0], taken[-1]) == (MAX_FRESH, 3.0, MAX_FRESH + 2.0)
    assert sum(durations.counts) == MAX_FRESH + 4
