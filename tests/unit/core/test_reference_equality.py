"""With `inflightAwareness: false` the rule names exactly what the reference names.

Against a naive model on random pools, and against committed vectors (`tests/data/decisions`; written
once by that model and not to be regenerated: they also guard the model).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.kv_source import choose_source
from epp.core.thresholds import SourcePolicy
from epp.core.types import SchedulingRequest
from tests.unit.core import rows as core_rows
from tests.unit.core.reference_rule import Case, Row, fnv_1a_32, random_case, reference_source

VECTORS = Path(__file__).parents[2] / "data" / "decisions" / "reference-source-rule.jsonl"


def ours(case: Case, *, pulls: int = 0, aware: bool = False) -> str | None:
    """The same case through the product. `pulls`: outstanding ones that must not matter."""
    candidates = []
    for number, row in enumerate(case.rows):
        candidate = core_rows.candidate(
            row.name,
            blocks=row.all_blocks,
            cpu=row.cpu_blocks,
            waiting=None if row.waiting is None else float(row.waiting),
            pulls=pulls * number,
            block_tokens=case.block_tokens,
        )
        candidates.append(candidate)
    computing = next(c for c in candidates if c.endpoint.id.pod == case.computing)
    policy = SourcePolicy(configured=True, min_cached_token_delta=case.delta_tokens, inflight_awareness=aware)
    request = SchedulingRequest(case.request_id, "m", range(8192))
    source = choose_source(request, candidates, computing, policy).source
    return source.endpoint.id.pod if source else None


@given(st.integers(0, 2**32))
def test_random_pools_are_decided_as_the_reference_decides_them(seed: int) -> None:
    case = random_case(random.Random(seed))
    assert ours(case, pulls=3) == reference_source(case)


def _vectors() -> list[tuple[Case, str | None]]:
    lines = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    return [
        (Case(**(v["case"] | {"rows": tuple(Row(**r) for r in v["case"]["rows"])})), v["source"])
        for v in lines
    ]


def test_golden_vectors() -> None:
    vectors = _vectors()
    assert len(vectors) == 200
    wrong = [case.request_id for case, source in vectors if ours(case) != source]
    assert wrong == []
    assert {source is None for _, source in vectors} == {True, False}


def test_in_flight_awareness_makes_a_difference_on_the_vectors() -> None:
    """Otherwise the equality above would prove nothing about the switch."""
    assert any(ours(case, pulls=3, aware=True) != source for case, source in _vectors())


@pytest.mark.parametrize(("text", "value"), [(b"", 0x811C9DC5), (b"a", 0xE40C292C), (b"foobar", 0xBF9CF968)])
def test_the_models_hash_is_fnv_1a_32(text: bytes, value: int) -> None:
    assert fnv_1a_32(text) == value
