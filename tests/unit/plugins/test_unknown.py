"""The one rule for what is not known, held by every plugin that reads something that can be unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from epp.core.plugin import Filter, Scorer
from epp.core.types import Candidate, ClaimState, LoraState
from epp.plugins.affinity_filter import PrefixCacheAffinityFilter
from epp.plugins.filters import UtilizationFilter
from epp.plugins.lora_affinity import LoraAffinityScorer
from epp.plugins.no_hit_lru import NoHitLruScorer
from epp.plugins.saturation import UtilizationDetector
from epp.plugins.scorers import (
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    PrefixCacheScorer,
    QueueScorer,
    RunningRequestsScorer,
)
from epp.plugins.unknown import NEUTRAL, fill_unknown, mean_of_known
from tests.unit.core.rows import candidate
from tests.unit.plugins.pools import asked, loaded, pods, with_loras

Rows = Sequence[Candidate]
SCORERS: list[tuple[Scorer, Callable[[], Rows], Callable[[], Rows]]] = [
    # scorer, (low, high, unknown), all unknown
    (
        QueueScorer("s"),
        lambda: [candidate("a", waiting=0), candidate("b", waiting=8), candidate("c", waiting=None)],
        lambda: [candidate("a", waiting=None)] * 2,
    ),
    (
        KvCacheUtilizationScorer("s"),
        lambda: [candidate("a", usage=0.1), candidate("b", usage=0.7), candidate("c", usage=None)],
        lambda: [candidate("a", usage=None)] * 2,
    ),
    (
        LoadAwareScorer("s"),
        lambda: [candidate("a", waiting=0), candidate("b", waiting=64), candidate("c", waiting=None)],
        lambda: [candidate("a", waiting=None)] * 2,
    ),
    (
        PrefixCacheScorer("s"),
        lambda: [loaded("a", blocks=100), loaded("b"), loaded("c", known=False)],
        lambda: [loaded("a", known=False)] * 2,
    ),
    (
        LoraAffinityScorer("s"),
        lambda: [
            with_loras("a", LoraState(frozenset({"x"}), max_loras=4)),
            with_loras("b", LoraState()),
            with_loras("c", None),
        ],
        lambda: [with_loras("a", None)] * 2,
    ),
]


@pytest.mark.parametrize(("scorer", "mixed", "unknown"), SCORERS, ids=lambda v: type(v).__name__)
def test_a_scorer_gives_the_unknown_the_mean_of_the_known(
    scorer: Scorer, mixed: Callable[[], Rows], unknown: Callable[[], Rows]
) -> None:
    """S-D01, S-D02: neither idle nor full."""
    high, low, unknown_score = scorer.score(asked(lora="x"), mixed())
    assert low < high
    assert unknown_score == pytest.approx((low + high) / 2)
    assert list(scorer.score(asked(lora="x"), unknown())) == [NEUTRAL, NEUTRAL]


def test_running_requests_follow_the_same_rule() -> None:
    rows = [candidate("a"), candidate("b")]  # both report 0 running
    assert list(RunningRequestsScorer("s").score(asked(), rows)) == [1.0, 1.0]


def test_nobody_knows_whether_a_prompt_is_cold() -> None:
    rows = [loaded("a", known=False), loaded("b", known=False)]
    assert list(NoHitLruScorer("s").score(asked(), rows)) == [NEUTRAL, NEUTRAL]


def test_filters_pass_everybody_where_nothing_is_known() -> None:
    rows = [candidate("a", waiting=None, state=ClaimState.UNKNOWN)] * 2
    filters: list[Filter] = [
        UtilizationFilter("f", (("waiting-queue", 1.0),)),
        PrefixCacheAffinityFilter("f"),
        UtilizationDetector("f"),
    ]
    for plugin in filters:
        assert len(plugin.filter(asked(), rows)) == 2


def test_the_unknown_leaves_with_the_mean() -> None:
    """A pool that is overloaded as far as it is known does not send everything where nothing is known."""
    plugin = UtilizationFilter("f", (("waiting-queue", 5.0),))
    rows = [candidate("a", waiting=2), candidate("b", waiting=20), candidate("c", waiting=None)]
    assert pods(plugin.filter(asked(), rows)) == ["a"]
    rows = [candidate("a", waiting=2), candidate("b", waiting=6), candidate("c", waiting=None)]
    assert pods(plugin.filter(asked(), rows)) == ["a", "c"]


def test_the_parts_of_the_rule() -> None:
    assert mean_of_known([None, 1.0, 3.0]) == 2.0
    assert mean_of_known([None, None]) is None
    assert fill_unknown([None, None]) == [NEUTRAL, NEUTRAL]
