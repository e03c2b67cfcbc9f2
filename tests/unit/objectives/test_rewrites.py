"""Which model a request is for: precedence, weights, and what an object may not say."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from epp.core.model_rewrite import ModelRewrites, RewriteObject, RewriteRule, RewriteTarget
from epp.objectives.views import Objective, view_objective, view_rewrite


def rewrites(*objects: tuple[str, str, tuple[RewriteRule, ...]]) -> ModelRewrites:
    return ModelRewrites(RewriteObject(*fields) for fields in objects)


def rule(models: str, *targets: str | tuple[str, int]) -> RewriteRule:
    made = (RewriteTarget(t) if isinstance(t, str) else RewriteTarget(*t) for t in targets)
    return RewriteRule(tuple(models.split()), tuple(made))


def chosen(found: ModelRewrites, model: str, request_id: str = "r") -> str | None:
    rewrite = found.choose(model, request_id)
    return None if rewrite is None else rewrite.model


def test_a_rule_that_names_the_model_wins_over_one_for_all() -> None:
    found = rewrites(
        ("a", "2025", (rule("", "any"), rule("chat", "llama"))), ("b", "2026", (rule("", "late"),))
    )
    assert [chosen(found, m) for m in ("chat", "other")] == ["llama", "any"]
    assert len(found) == 2


def test_no_rule_no_rewrite() -> None:
    assert chosen(rewrites(("a", "2025", (rule("chat", "llama"),))), "other") is None
    assert chosen(ModelRewrites(), "chat") is None


def test_the_older_object_wins_then_the_name_whatever_the_order() -> None:
    objects = [("b", "2025", (rule("m", "from-b"),)), ("a", "2026", (rule("m", "from-a"),))]
    assert {chosen(rewrites(*order), "m") for order in (objects, objects[::-1])} == {"from-b"}
    same = [("b", "2025", (rule("m", "from-b"),)), ("a", "2025", (rule("m", "from-a"),))]
    assert {chosen(rewrites(*order), "m") for order in (same, same[::-1])} == {"from-a"}


def test_the_first_rule_of_an_object_wins() -> None:
    assert chosen(rewrites(("a", "", (rule("m", "first"), rule("m", "second")))), "m") == "first"


def test_targets_are_sampled_by_weight_and_a_request_keeps_its_own() -> None:
    found = rewrites(("a", "", (rule("m", ("x", 9), ("y", 1)),)))
    counts = Counter(chosen(found, "m", f"request-{n}") for n in range(10_000))
    assert counts.keys() == {"x", "y"}
    assert 800 < counts["y"] < 1200
    assert chosen(found, "m", "request-7") == chosen(found, "m", "request-7")


def test_what_was_chosen_names_its_object() -> None:
    rewrite = rewrites(("canary", "", (rule("m", "m2"),))).choose("m", "r")
    assert rewrite is not None
    assert rewrite.object_name == "canary"


def raw(spec: dict[str, Any]) -> bytes:
    return json.dumps({"metadata": {"name": "o", "creationTimestamp": "2026"}, "spec": spec}).encode()


def test_an_object_as_the_server_writes_it() -> None:
    matches = [{"model": {"type": "Exact", "value": "chat"}}, {"model": {"value": "chat-2"}}]
    targets = [{"modelRewrite": "llama", "weight": 3}, {"modelRewrite": "qwen"}]
    view = view_rewrite(raw({"poolRef": {"name": "p"}, "rules": [{"matches": matches, "targets": targets}]}))
    assert view.pool == "p"
    assert view.object == RewriteObject("o", "2026", (rule("chat chat-2", ("llama", 3), "qwen"),))
    assert view_objective(raw({"poolRef": {"name": "p"}, "priority": -3})) == Objective("p", -3)
    assert view_objective(raw({"poolRef": {"name": "p"}})) == Objective("p", 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"matches": [{"model": {"type": "Regex", "value": "x"}}], "targets": [{"modelRewrite": "m"}]},
        {"targets": []},
        {"targets": [{"modelRewrite": "m", "weight": 0}]},
        {"targets": [{"modelRewrite": "", "weight": 1}]},
        {"targets": [{"modelRewrite": 3}]},
    ],
)
def test_a_rule_that_cannot_be_meant_is_no_rule(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        view_rewrite(raw({"poolRef": {"name": "p"}, "rules": [bad]}))
