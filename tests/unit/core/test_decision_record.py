"""The ring of decisions: joined, settled, finished, bounded."""

from __future__ import annotations

from epp.core.decision_record import DecisionRing, PullState
from epp.core.types import KvSource, Outcome, PullReport, SchedulingDecision, SourceChoice, SourceReason
from tests.unit.core.rows import endpoint

DONE = Outcome(status=200, completed=True)


def decision(number: int, *, pulls: bool = True) -> SchedulingDecision:
    a, b = endpoint("a"), endpoint("b")
    source = KvSource(b, 160, 100) if pulls else None
    choice = SourceChoice(source, SourceReason.PULL if pulls else SourceReason.NO_HOLDER)
    return SchedulingDecision(f"d{number}", f"r{number}", a, (), None, choice, (), a.id, 60)


def report(number: int) -> PullReport:
    return PullReport(f"d{number}", "10.0.0.1:7777", 160, 112, 4096, "shortfall", 3.0)


def test_a_record_is_finished_when_it_is_closed_and_settled_in_either_order() -> None:
    ring = DecisionRing(8)
    for number in range(2):
        ring.add(decision(number), 0.0, report_by_s=11.0)
    assert ring.join_report(report(0))
    assert [r.decision.decision_id for r in ring.take_settled()] == ["d0"]
    assert ring.take_finished() == []
    ring.close("d0", DONE)
    ring.close("d1", DONE)
    assert [r.decision.decision_id for r in ring.take_finished()] == ["d0"]
    assert ring.join_report(report(1))
    (late,) = ring.take_finished()
    assert (late.outcome, late.report, late.promised_tokens) == (DONE, report(1), 100)
    assert ring.take_finished() == []
    assert ring.find("r1") is ring.find("d1") is not None


def test_without_a_pull_the_end_of_the_stream_is_enough() -> None:
    ring = DecisionRing(8)
    ring.add(decision(1, pulls=False), 0.0, report_by_s=11.0)
    ring.close("d1", DONE)
    ring.close("d1", Outcome(status=500))
    (record,) = ring.take_finished()
    assert (record.pull_state, record.outcome) == (PullState.NONE, DONE)
    assert not ring.join_report(report(1))
    assert ring.take_settled() == []


def test_no_report_in_time_is_unknown() -> None:
    ring = DecisionRing(8)
    ring.add(decision(1), 0.0, report_by_s=11.0)
    ring.expire(10.9)
    assert ring.find("d1").pull_state is PullState.PENDING  # type: ignore[union-attr]
    ring.expire(11.0)
    (record,) = ring.take_settled()
    assert (record.pull_state, record.report) == (PullState.UNKNOWN, None)
    assert not ring.join_report(report(1))


def test_open_records_outlive_closed_ones() -> None:
    ring = DecisionRing(3)
    ring.add(decision(0), 0.0, report_by_s=11.0)
    for number in range(1, 6):
        ring.add(decision(number, pulls=False), 0.0, report_by_s=11.0)
        ring.close(f"d{number}", DONE)
    assert len(ring) == 3
    assert ring.find("r0") is not None
    assert ring.find("r1") is ring.find("d1") is None
    for number in range(6, 12):  # all open: the oldest goes
        ring.add(decision(number), 0.0, report_by_s=11.0)
    assert len(ring) == 3
    assert ring.find("r0") is None
    ring.expire(12.0)
    assert {r.decision.decision_id for r in ring.take_settled()} == {"d9", "d10", "d11"}


def test_finished_records_that_nobody_takes_are_counted_not_kept() -> None:
    ring = DecisionRing(2)
    for number in range(5):
        ring.add(decision(number, pulls=False), 0.0, report_by_s=11.0)
        ring.close(f"d{number}", DONE)
    assert len(ring.take_finished()) == 2
    assert ring.unread == 3
