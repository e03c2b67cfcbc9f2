"""Who of those that wait is next."""

from __future__ import annotations

import pytest

from epp.core.flow_queue import FlowHead, Waiting
from epp.plugins import flow_policies
from epp.plugins.flow_policies import (
    GlobalStrictFairness,
    Ordering,
    ProgramAwareFairness,
    RoundRobinFairness,
)
from epp.plugins.plugin_type import NO_INPUTS
from epp.plugins.registry import PLUGIN_TYPES


def waiting(number: int, flow: str = "f", **changed: float | None) -> Waiting:
    values: dict[str, float | None] = {"arrived_s": float(number), "expires_at_s": 60.0 + number, **changed}
    return Waiting(number, flow, 0, 1, **values)  # type: ignore[arg-type]


def heads(*rows: Waiting) -> list[FlowHead]:
    return [FlowHead(row.flow, row, (row.arrived_s, row.number)) for row in rows]


def ordering(type_name: str) -> Ordering:
    row = PLUGIN_TYPES[type_name]
    assert row.build is not None
    made = row.build(type_name, None, NO_INPUTS)
    assert isinstance(made, Ordering)
    return made


@pytest.mark.parametrize(
    ("type_name", "order"),
    [
        ("fcfs-ordering-policy", [1, 2, 3]),
        ("edf-ordering-policy", [3, 1, 2]),
        ("slo-deadline-ordering-policy", [2, 1, 3]),  # 3 has no objective
    ],
)
def test_orderings(type_name: str, order: list[int]) -> None:
    rows = [
        waiting(1, expires_at_s=50.0, slo_ttft_s=9.0),
        waiting(2, expires_at_s=70.0, slo_ttft_s=1.0),
        waiting(3, expires_at_s=10.0),
    ]
    assert [row.number for row in sorted(rows, key=ordering(type_name).key)] == order


def test_global_strict_takes_the_first_of_all() -> None:
    assert GlobalStrictFairness("f").choose(heads(waiting(2, "a"), waiting(1, "b")), 9.0).flow == "b"


def test_round_robin_gives_every_flow_its_turn() -> None:
    policy = RoundRobinFairness("f")
    rows = heads(waiting(1, "a"), waiting(2, "b"), waiting(3, "c"))
    assert [policy.choose(rows, 0.0).flow for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert policy.choose(heads(waiting(4, "a")), 0.0).flow == "a"


def test_the_program_that_had_the_least_service_is_next() -> None:
    policy = ProgramAwareFairness("f", half_life_s=60.0)
    rows = heads(waiting(1, "a"), waiting(2, "b"))
    assert policy.choose(rows, 0.0).flow == "a"  # equal: by arrival
    policy.served("a", prompt_tokens=100, output_tokens=10, now_s=0.0)
    assert policy.service("a", 0.0) == 120.0  # output is twice as dear
    assert policy.choose(rows, 0.0).flow == "b"
    policy.served("b", prompt_tokens=70, output_tokens=0, now_s=60.0)
    assert policy.service("a", 60.0) == 60.0  # half of it is forgotten
    assert policy.choose(rows, 60.0).flow == "a"


def test_its_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_policies, "MAX_PROGRAMS", 3)
    policy = ProgramAwareFairness("f")
    for n in range(10):
        policy.served(f"p{n}", prompt_tokens=n, output_tokens=0, now_s=0.0)
    assert [policy.service(f"p{n}", 0.0) for n in (6, 7, 8, 9)] == [0.0, 7.0, 8.0, 9.0]
