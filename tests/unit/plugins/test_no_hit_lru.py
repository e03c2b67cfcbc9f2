"""Cold prompts go where none has been for the longest time; warm ones are left alone."""

from __future__ import annotations

from epp.core.types import Candidate
from epp.plugins.no_hit_lru import NoHitLruScorer
from epp.plugins.plugin_type import PLACED
from tests.unit.plugins.pools import asked, loaded, placed

COLD = [loaded("a"), loaded("b"), loaded("c"), loaded("d")]


def place(scorer: NoHitLruScorer, target: Candidate, pool: list[Candidate] = COLD) -> None:
    assert scorer.placed(asked(), pool, {"default": target}) == {}


def test_endpoints_without_a_cold_request_are_best_and_the_last_one_is_worst() -> None:
    scorer = NoHitLruScorer("s")
    assert list(scorer.score(asked(), COLD)) == [1.0, 1.0, 1.0, 1.0]
    place(scorer, COLD[1])
    place(scorer, COLD[0])
    assert list(scorer.score(asked(), COLD)) == [0.0, 1 - 2 / 3, 1.0, 1.0]
    place(scorer, COLD[1])
    assert list(scorer.score(asked(), COLD)) == [1 - 2 / 3, 0.0, 1.0, 1.0]


def test_a_warm_prompt_is_neutral_and_is_not_remembered() -> None:
    scorer = NoHitLruScorer("s")
    warm = [loaded("a", blocks=1), *COLD[1:]]
    assert list(scorer.score(asked(), warm)) == [0.5] * 4
    place(scorer, warm[0], warm)
    assert list(scorer.score(asked(), COLD)) == [1.0] * 4


def test_both_stages_of_a_split_request_count() -> None:
    scorer = NoHitLruScorer("s")
    scorer.placed(asked(), COLD, {"decode": COLD[0], "prefill": COLD[3]})
    assert list(scorer.score(asked(), COLD)) == [1 - 2 / 3, 1.0, 1.0, 0.0]


def test_one_candidate_is_the_best_one() -> None:
    scorer = NoHitLruScorer("s")
    place(scorer, COLD[0])
    assert list(scorer.score(asked(), COLD[:1])) == [1.0]


def test_its_memory_is_bounded() -> None:
    scorer = NoHitLruScorer("s", lru_size=2)
    for row in COLD:
        place(scorer, row)
    assert list(scorer.score(asked(), COLD)) == [1.0, 1.0, 1 - 2 / 3, 0.0]


def test_it_reads_the_producer_it_is_wired_to() -> None:
    rows = [placed("a", 5), placed("b", 0)]
    assert list(NoHitLruScorer("s", prefix=PLACED).score(asked(), rows)) == [0.5, 0.5]
    assert list(NoHitLruScorer("s", prefix=PLACED).score(asked(), rows[1:] * 2)) == [1.0, 1.0]
