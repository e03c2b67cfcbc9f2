"""A step never exceeds its budget, decodes first, and computes each token once."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from epp.engine_model.batching import has_budget_left, plan_step


@dataclass
class Row:
    prompt_tokens: int
    computed: int = 0


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), max_size=12), st.integers(1, 300))
def test_a_step_stays_within_its_budget_and_decodes_first(sizes: list[tuple[int, int]], budget: int) -> None:
    rows = [Row(prompt, computed) for prompt, computed in sizes]
    portions = list(plan_step(rows, budget))
    assert sum(p.stop - p.start for p in portions) <= budget
    kinds = [p.is_prefill for p in portions]
    assert kinds == sorted(kinds)  # False (decode) before True
    assert all(p.start == p.request.computed for p in portions)
    assert all(p.stop - p.start == 1 for p in portions if not p.is_prefill)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=8), st.integers(1, 300))
def test_prompts_are_computed_once_and_in_order(prompts: list[int], budget: int) -> None:
    rows = [Row(prompt) for prompt in prompts]
    computed, steps = 0, 0
    while any(r.computed < r.prompt_tokens for r in rows):
        waiting = [r for r in rows if r.computed < r.prompt_tokens]
        for portion in plan_step(waiting, budget):
            computed += portion.stop - portion.start
            portion.request.computed = portion.stop
        done = [r.computed >= r.prompt_tokens for r in rows]
        assert done == sorted(done, reverse=True)  # nobody overtakes
        steps += 1
    assert computed == sum(prompts)
    assert steps == -(-sum(prompts) // budget)  # no step leaves budget while there is work


def test_nothing_is_admitted_behind_a_full_step() -> None:
    assert has_budget_left([], 8)
    assert has_budget_left([Row(4), Row(9, 9)], 8)
    assert not has_budget_left([Row(8)], 8)
    assert not has_budget_left([Row(7), Row(9, 9)], 8)
