"""Rows wait for their endpoints: for one use, at one address, until one moment."""

from __future__ import annotations

from engine_plugin.identity import EndpointId
from epp.siblings.holding import HeldRows, HoldingCounters
from tests.unit.siblings.test_wire import row

A = EndpointId("pod-a", 3)


def test_a_row_is_given_once_to_its_endpoint_at_its_address() -> None:
    held = HeldRows([row()], until_s=10.0)
    assert held.take(EndpointId("pod-a", 2), "10.0.0.1", 5557, 1.0) is None
    assert held.take(A, "10.0.0.1", 5557, 9.9) == row().view
    assert held.take(A, "10.0.0.1", 5557, 9.9) is None
    assert held.counters == HoldingCounters(offered=1)


def test_the_same_name_at_another_address_is_another_engine() -> None:
    for host, port in (("10.0.0.2", 5557), ("10.0.0.1", 5558)):
        held = HeldRows([row()], until_s=10.0)
        assert held.take(A, host, port, 1.0) is None
        assert held.take(A, "10.0.0.1", 5557, 1.0) is None  # it has been here: the row is stale now
        assert held.counters == HoldingCounters(moved=1)


def test_after_its_time_nothing_is_given_and_nothing_kept() -> None:
    held = HeldRows([row(), row(pod="pod-b")], until_s=10.0)
    assert held.expire(9.9) == 0
    assert held.take(A, "10.0.0.1", 5557, 10.0) is None
    assert len(held) == 0
    assert held.counters == HoldingCounters(expired=2)
    assert held.expire(11.0) == 0


def test_a_second_row_of_one_endpoint_is_not_kept() -> None:
    held = HeldRows([row(records=2), row(records=5)], until_s=10.0)
    assert len(held) == 1
    assert held.take(A, "10.0.0.1", 5557, 1.0) == row(records=2).view
