"""What was decided and why, joined with what happened: the evidence behind explain, replay and alerts.

Life of a record: `add` -> (`join_report` or `expire`) and `close`, in any order. Its pull is *settled*
once the engine has reported, or unknown once the time for that has passed; the record is *finished* once
it is closed and settled. Both are handed out once, through bounded queues.
Holds ids, addresses and numbers only: no prompt, token, salt or header value.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

from epp.core.types import MAX_RECORDED, Outcome, PullReport, SchedulingDecision


class PullState(enum.Enum):
    """What is known of the pull that a decision named. Stable: ledger values and metric labels."""

    NONE = "none"  # no source was named
    PENDING = "pending"
    REPORTED = "reported"
    UNKNOWN = "unknown"  # no report came in time: neither kept nor failed


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision, and what happened as far as it is known."""

    decided_at_s: float
    decision: SchedulingDecision
    outcome: Outcome | None = None
    pull_state: PullState = PullState.NONE
    report: PullReport | None = None

    @property
    def promised_tokens(self) -> int:
        source = self.decision.choice.source
        return source.gain_tokens if source is not None else 0


class DecisionRing:
    """Decisions by decision id, findable by request id too (the newest wins). At most `capacity`;
    the oldest closed ones go first, so that an open one is dropped only when nothing else is left."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        self._open: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._closed: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._deadlines: list[tuple[float, str]] = []  # heap of pulls that a report may still come for
        self._settled: deque[DecisionRecord] = deque(maxlen=capacity)
        self._finished: deque[DecisionRecord] = deque(maxlen=capacity)
        self.unread = 0  # finished records that nobody took in time

    def __len__(self) -> int:
        return len(self._open) + len(self._closed)

    def add(self, decision: SchedulingDecision, now_s: float, *, report_by_s: float) -> None:
        """`report_by_s`: when a missing report becomes `unknown`."""
        if len(decision.scored) > MAX_RECORDED:
            decision = replace(decision, scored=decision.scored[:MAX_RECORDED])
        state = PullState.NONE
        if decision.choice.source is not None:
            state = PullState.PENDING
            heapq.heappush(self._deadlines, (report_by_s, decision.decision_id))
        self._open[decision.decision_id] = DecisionRecord(now_s, decision, pull_state=state)
        self._by_request[decision.request_id] = decision.decision_id
        while len(self) > self._capacity:
            old_id, old = (self._closed or self._open).popitem(last=False)
            if self._by_request.get(old.decision.request_id) == old_id:
                del self._by_request[old.decision.request_id]

    def close(self, decision_id: str, outcome: Outcome) -> None:
        """The stream has ended. Unknown ids and repetitions are ignored."""
        record = self._open.pop(decision_id, None)
        if record is not None:
            record = self._closed[decision_id] = DecisionRecord(
                record.decided_at_s, record.decision, outcome, record.pull_state, record.report
            )
            self._hand_out_if_finished(record)

    def join_report(self, report: PullReport) -> bool:
        """False: no such decision, or its pull is settled already."""
        return self._settle(report.decision_id, PullState.REPORTED, report)

    def expire(self, now_s: float) -> None:
        """Pulls whose report is overdue become unknown."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            self._settle(heapq.heappop(self._deadlines)[1], PullState.UNKNOWN, None)

    def _settle(self, decision_id: str, state: PullState, report: PullReport | None) -> bool:
        home = self._open if decision_id in self._open else self._closed
        record = home.get(decision_id)
        if record is None or record.pull_state is not PullState.PENDING:
            return False
        record = home[decision_id] = replace(record, pull_state=state, report=report)
        self._settled.append(record)
        self._hand_out_if_finished(record)
        return True

    def _hand_out_if_finished(self, record: DecisionRecord) -> None:
        if record.outcome is not None and record.pull_state is not PullState.PENDING:
            self.unread += len(self._finished) == self._capacity
            self._finished.append(record)

    def take_settled(self) -> list[DecisionRecord]:
        """Records whose pull was settled since the last call."""
        return _drain(self._settled)

    def take_finished(self) -> list[DecisionRecord]:
        """Records that were finished since the last call."""
        return _drain(self._finished)

    def find(self, decision_or_request_id: str) -> DecisionRecord | None:
        key = self._by_request.get(decision_or_request_id, decision_or_request_id)
        return self.get(key)

    def get(self, decision_id: str) -> DecisionRecord | None:
        return self._open.get(decision_id) or self._closed.get(decision_id)


def _drain(queue: deque[DecisionRecord]) -> list[DecisionRecord]:
    taken = list(queue)
    queue.clear()
    return taken
