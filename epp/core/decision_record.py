"""What was decided and why, kept in a ring: the evidence behind `/debug/kvpull/decisions`.

Holds ids, addresses and numbers only: no prompt, token, salt or header value.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from epp.core.types import Outcome, SchedulingDecision

MAX_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision, and what happened once its stream has ended."""

    decided_at_s: float
    decision: SchedulingDecision
    outcome: Outcome | None = None


class DecisionRing:
    """The last `capacity` decisions by decision id, findable by request id too (the newest wins)."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        self._by_decision: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._by_request: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_decision)

    def add(self, decision: SchedulingDecision, now_s: float) -> None:
        trimmed = replace(decision, scored=decision.scored[:MAX_CANDIDATES])
        self._by_decision[decision.decision_id] = DecisionRecord(now_s, trimmed)
        self._by_request[decision.request_id] = decision.decision_id
        while len(self._by_decision) > self._capacity:
            old_id, old = self._by_decision.popitem(last=False)
            if self._by_request.get(old.decision.request_id) == old_id:
                del self._by_request[old.decision.request_id]

    def close(self, decision_id: str, outcome: Outcome) -> None:
        record = self._by_decision.get(decision_id)
        if record is not None:
            self._by_decision[decision_id] = replace(record, outcome=outcome)

    def find(self, decision_or_request_id: str) -> DecisionRecord | None:
        key = self._by_request.get(decision_or_request_id, decision_or_request_id)
        return self._by_decision.get(key)
