"""prefix-cache-affinity-filter: stay with the warm ones, as long as waiting there is worth it."""

from __future__ import annotations

from collections import Counter

import pytest

from epp.plugins.affinity_filter import PrefixCacheAffinityFilter
from epp.plugins.plugin_type import PLACED, TierWeights
from tests.unit.core.rows import candidate
from tests.unit.plugins.pools import asked, loaded, placed, pods


def test_only_the_warm_ones_stay() -> None:
    rows = [loaded("a", blocks=80), loaded("b", blocks=79), loaded("c", blocks=100), loaded("d", known=False)]
    assert pods(PrefixCacheAffinityFilter("f").filter(asked(), rows)) == ["a", "c"]


def test_nobody_is_warm_and_everybody_stays() -> None:
    rows = [loaded("a", blocks=79), loaded("b"), loaded("c", known=False)]
    assert pods(PrefixCacheAffinityFilter("f").filter(asked(), rows)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("ahead_tokens", "budget_ms", "kept"),
    [
        (5541 * 55, 55_000.0, ["warm"]),  # exactly the budget
        (5541 * 55 + 1, 55_000.0, ["warm", "cold"]),
        (10**9, 0.0, ["warm"]),  # 0: always stay
    ],
)
def test_the_budget_is_what_waiting_may_cost(ahead_tokens: int, budget_ms: float, kept: list[str]) -> None:
    """The penalty is the difference to the best other one."""
    plugin = PrefixCacheAffinityFilter("f", max_penalty_ms=budget_ms, peak_tokens_per_s=5541.0)
    rows = [loaded("warm", blocks=100, tokens=7_000 + ahead_tokens), loaded("cold", tokens=7_000)]
    assert pods(plugin.filter(asked(), rows)) == kept


def test_the_best_warm_one_decides() -> None:
    plugin = PrefixCacheAffinityFilter("f", max_penalty_ms=1_000.0, peak_tokens_per_s=1_000.0)
    rows = [loaded("busy", blocks=100, tokens=99_000), loaded("free", blocks=100), loaded("cold")]
    assert pods(plugin.filter(asked(), rows)) == ["busy", "free"]


def test_tier_weights_count() -> None:
    rows = [candidate("cpu", blocks=100, device=0), candidate("cold")]
    cheap = PrefixCacheAffinityFilter("f", weights=TierWeights(1.0, 0.4))
    assert pods(cheap.filter(asked(), rows)) == ["cpu", "cold"]
    assert pods(PrefixCacheAffinityFilter("f").filter(asked(), rows)) == ["cpu"]


def test_exploration_is_a_share_of_requests() -> None:
    plugin = PrefixCacheAffinityFilter("f", exploration=0.25)
    rows = [loaded("warm", blocks=100), loaded("cold")]
    kept = Counter(len(plugin.filter(asked(f"r{n}"), rows)) for n in range(2_000))
    assert 400 < kept[2] < 600


def test_by_placements_and_pieces_of_the_prompt() -> None:
    rows = [placed("a", 100), placed("b", 0)]
    plugin = PrefixCacheAffinityFilter("f", prefix=PLACED)
    assert pods(plugin.filter(asked(tokens=None, pieces=1600), rows)) == ["a"]
    assert pods(PrefixCacheAffinityFilter("f").filter(asked(), rows)) == ["a", "b"]
