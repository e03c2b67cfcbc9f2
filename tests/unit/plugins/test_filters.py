"""Filters by role, label and utilisation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from epp.core.types import Candidate
from epp.plugins.filters import (
    LabelRequirement,
    LabelSelectorFilter,
    UtilizationFilter,
    UtilizationFilterParameters,
    encode_filter,
)
from tests.unit.core.rows import candidate
from tests.unit.plugins.pools import asked, loaded, pods


def labelled(pod: str, **labels: str) -> Candidate:
    row = candidate(pod)
    return row._replace(endpoint=replace(row.endpoint, labels=labels))


ROWS = [labelled("a", zone="x", gpu="h100"), labelled("b", zone="y"), labelled("c")]


@pytest.mark.parametrize(
    ("operator", "values", "kept"),
    [
        ("In", ["x", "y"], ["a", "b"]),
        ("NotIn", ["x"], ["b", "c"]),  # an absent label is not in
        ("Exists", [], ["a", "b"]),
        ("DoesNotExist", [], ["c"]),
    ],
)
def test_operators_of_label_selectors(operator: str, values: list[str], kept: list[str]) -> None:
    term = LabelRequirement.model_validate({"key": "zone", "operator": operator, "values": values})
    assert pods(LabelSelectorFilter("f", {}, (term,)).filter(asked(), ROWS)) == kept


def test_all_terms_must_match_and_no_term_matches_everybody() -> None:
    term = LabelRequirement.model_validate({"key": "zone", "operator": "Exists"})
    assert pods(LabelSelectorFilter("f", {"gpu": "h100"}, (term,)).filter(asked(), ROWS)) == ["a"]
    assert pods(LabelSelectorFilter("f", {}).filter(asked(), ROWS)) == ["a", "b", "c"]


@pytest.mark.parametrize(("operator", "values"), [("In", []), ("Exists", ["x"]), ("Gt", ["1"])])
def test_selectors_that_kubernetes_refuses(operator: str, values: list[str]) -> None:
    with pytest.raises(ValidationError):
        LabelRequirement.model_validate({"key": "zone", "operator": operator, "values": values})


@pytest.mark.parametrize(
    ("role", "kept"), [("encode", 1), ("encode-prefill", 1), ("decode", 0), (None, 0), ("prefill", 0)]
)
def test_encode_role(role: str | None, kept: int) -> None:
    assert len(encode_filter("f").filter(asked(), [candidate("a", role=role)])) == kept


def test_every_condition_has_to_hold() -> None:
    rows = [
        candidate("a", waiting=1, usage=0.2),
        candidate("b", waiting=9, usage=0.2),
        candidate("c", waiting=1, usage=0.95),
    ]
    both = UtilizationFilter("f", (("waiting-queue", 5.0), ("kv-cache-utilization", 0.9)))
    assert pods(both.filter(asked(), rows)) == ["a"]


def test_active_requests_are_our_own() -> None:
    rows = [loaded("a", requests=3), loaded("b", requests=4)]
    assert pods(UtilizationFilter("f", (("active-requests", 3.0),)).filter(asked(), rows)) == ["a"]


def test_nobody_left_is_an_error_unless_it_falls_back() -> None:
    rows = [candidate("a", waiting=9), candidate("b", waiting=8)]
    conditions = (("waiting-queue", 5.0),)
    assert pods(UtilizationFilter("f", conditions).filter(asked(), rows)) == []
    assert pods(UtilizationFilter("f", conditions, fallback_on_empty=True).filter(asked(), rows)) == [
        "a",
        "b",
    ]


def test_a_filter_needs_a_condition_with_a_known_metric() -> None:
    with pytest.raises(ValidationError):
        UtilizationFilterParameters.model_validate({"conditions": []})
    with pytest.raises(ValidationError):
        UtilizationFilterParameters.model_validate({"conditions": [{"metric": "gpu", "maxValue": 1}]})
