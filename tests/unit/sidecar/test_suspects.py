"""How long a peer that failed is left alone."""

from __future__ import annotations

import pytest

from sidecar.endpoint import HostPort
from sidecar.suspects import FORGET_AFTER_S, MAX_PAUSE_S, Part, Suspects

_A, _B = HostPort("10.0.0.1", 8000), HostPort("10.0.0.2", 8000)
_SOURCE = Part.SOURCE


def _table(chance: float = 0.5, **more: int) -> Suspects:
    return Suspects(lambda: chance, **more)


def test_a_failure_starts_a_pause_that_ends() -> None:
    table = _table()
    table.failed(_SOURCE, _A, 100.0)
    assert table.has(_SOURCE, _A, 100.9)
    assert not table.has(_SOURCE, _A, 101.0)
    assert not table.has(_SOURCE, _B, 100.0)
    assert not table.has(Part.PREFILLER, _A, 100.0)


def test_pauses_double_up_to_the_limit() -> None:
    table, now_s, pauses = _table(), 0.0, []
    for _ in range(7):
        table.failed(_SOURCE, _A, now_s)
        step = next(n for n in range(100) if not table.has(_SOURCE, _A, now_s + n))
        pauses.append(step)
        now_s += step
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert pauses[-1] == MAX_PAUSE_S


def test_failures_of_requests_that_were_under_way_do_not_add_up() -> None:
    table = _table()
    for _ in range(50):
        table.failed(_SOURCE, _A, 0.5)
    assert not table.has(_SOURCE, _A, 1.5)
    table.failed(_SOURCE, _A, 1.5)
    assert table.has(_SOURCE, _A, 3.4)


def test_a_success_clears_and_time_forgets() -> None:
    table = _table()
    table.failed(_SOURCE, _A, 0.0)
    table.succeeded(_SOURCE, _A)
    assert (len(table), table.has(_SOURCE, _A, 0.0)) == (0, False)
    table.failed(_SOURCE, _A, 0.0)
    table.failed(_SOURCE, _A, FORGET_AFTER_S)
    assert not table.has(_SOURCE, _A, FORGET_AFTER_S + 1.0), "a first failure again"


@pytest.mark.parametrize(("chance", "pause_s"), [(0.0, 0.75), (1.0, 1.25)])
def test_pauses_are_spread(chance: float, pause_s: float) -> None:
    table = _table(chance)
    table.failed(_SOURCE, _A, 0.0)
    assert table.has(_SOURCE, _A, pause_s - 0.01)
    assert not table.has(_SOURCE, _A, pause_s)


def test_the_table_is_bounded() -> None:
    table = _table(max_entries=2)
    for n in range(1, 10):
        table.failed(_SOURCE, HostPort("10.0.0.9", n), 0.0)
    assert len(table) == 2
    assert table.has(_SOURCE, HostPort("10.0.0.9", 9), 0.0)
