"""All checks in their order: causes before what follows from them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from epp.ops.doctor import agreement, probing, reach
from epp.ops.doctor.facts import Facts
from epp.ops.doctor.findings import Check, Verdict

_Examine = Callable[[Facts, frozenset[str]], Check]

CHECKS: Final[tuple[_Examine, ...]] = (
    reach.pickers,
    reach.engines,
    agreement.block_sizes,
    agreement.seeds,
    agreement.models,
    reach.ports,
    reach.subscriptions,
    reach.clocks,
    reach.shared_memory,
    probing.tokens,
    probing.scores,
    probing.headers,
    probing.key_names,
    probing.moved,
)
_WITHOUT_ENDPOINTS: Final = (reach.pickers, reach.shared_memory)


def examine(facts: Facts) -> tuple[Check, ...]:
    """Every check once. Endpoints that one finds at fault are not blamed by the later ones."""
    blamed: frozenset[str] = frozenset()
    checks = []
    for look in CHECKS:
        check = look(facts, blamed)
        if not facts.endpoints and look not in _WITHOUT_ENDPOINTS and not check.findings:
            check = Check(check.name, "no endpoint is known", judged=False)
        checks.append(check)
        blamed = blamed.union(
            *(found.endpoints for found in check.findings if found.verdict is Verdict.FAULT)
        )
    return tuple(checks)


def has_fault(checks: tuple[Check, ...]) -> bool:
    return any(check.verdict is Verdict.FAULT for check in checks)
