"""What a check says: a verdict, and for everything wrong a place, the evidence and the remedy."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """Of a finding (the first two) or of a whole check."""

    FAULT = "fault"  # pulls do not work there
    WARNING = "warning"  # they may, but somebody should look
    OK = "ok"
    NOT_JUDGED = "not judged"  # what it needs is not known


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `endpoints` are the ones at fault (`pod/rank`): later checks do not blame
    what follows from it on anybody else."""

    place: str
    evidence: str
    remedy: str
    verdict: Verdict = Verdict.FAULT
    endpoints: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check. `seen` says what was looked at; with `judged` False, why nothing could be."""

    name: str
    seen: str
    findings: tuple[Finding, ...] = ()
    judged: bool = True

    @property
    def verdict(self) -> Verdict:
        kinds = {finding.verdict for finding in self.findings}
        for verdict in (Verdict.FAULT, Verdict.WARNING):
            if verdict in kinds:
                return verdict
        return Verdict.OK if self.judged else Verdict.NOT_JUDGED
