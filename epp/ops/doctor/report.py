"""The doctor's answer on a terminal and as JSON: the same content in both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from epp.ops.doctor.examine import has_fault
from epp.ops.doctor.findings import Check
from epp.ops.text import printable

Checks = tuple[Check, ...]


def lines(checks: Checks) -> Iterator[str]:
    """A table of checks, then one line a finding: place, evidence, remedy."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        yield printable(f"{check.name.ljust(width)}  {check.verdict:<10}  {check.seen}")
    found = [(check, finding) for check in checks for finding in check.findings]
    if found:
        yield ""
    for check, finding in found:
        yield printable(
            f"{finding.verdict.upper()} {check.name}: {finding.place}: {finding.evidence}."
            f" To mend it: {finding.remedy}."
        )


def as_json(checks: Checks) -> str:
    rows = [
        {
            "name": check.name,
            "verdict": check.verdict.value,
            "seen": check.seen,
            "findings": [
                asdict(f) | {"endpoints": sorted(f.endpoints), "verdict": f.verdict.value}
                for f in check.findings
            ],
        }
        for check in checks
    ]
    return json.dumps({"healthy": not has_fault(checks), "checks": rows}, indent=2)
