"""Filters: which candidates may serve at all. Semantics: llm-d-router at ebab687."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epp.core.thresholds import ROLE_LABEL
from epp.core.types import Candidate, ScheduleContext

DECODE_ROLES = frozenset({"decode", "prefill-decode", "encode-prefill-decode", "both"})
PREFILL_ROLES = frozenset({"prefill", "prefill-decode", "encode-prefill", "encode-prefill-decode", "both"})


@dataclass(frozen=True, slots=True)
class RoleFilter:
    """Keep endpoints whose role label is one of `roles`; `keep_unlabelled` as in the reference:
    an endpoint without a role may decode but is never a prefill worker."""

    name: str
    roles: frozenset[str]
    keep_unlabelled: bool

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for c in candidates if self._keeps(c.endpoint.labels.get(ROLE_LABEL))]

    def _keeps(self, role: str | None) -> bool:
        return self.keep_unlabelled if role is None else role in self.roles


def decode_filter(name: str) -> RoleFilter:
    return RoleFilter(name, DECODE_ROLES, keep_unlabelled=True)


def prefill_filter(name: str) -> RoleFilter:
    return RoleFilter(name, PREFILL_ROLES, keep_unlabelled=False)
