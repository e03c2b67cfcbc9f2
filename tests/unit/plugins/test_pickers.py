"""Pickers: who wins, and who is the fallback."""

from __future__ import annotations

from collections import Counter

import pytest

from epp.core.plugin import Picker
from epp.plugins.pickers import MaxScorePicker, RandomPicker, WeightedRandomPicker
from tests.unit.plugins.pools import asked


def wins(picker: Picker, scores: list[float], rounds: int = 4_000) -> Counter[int]:
    return Counter(picker.pick(asked(f"r{n}"), scores)[0] for n in range(rounds))


def test_max_score_takes_the_best_and_spreads_ties() -> None:
    assert set(wins(MaxScorePicker("p"), [0.1, 0.9, 0.3], 50)) == {1}
    tied = wins(MaxScorePicker("p"), [0.9, 0.1, 0.9, 0.9])
    assert set(tied) == {0, 2, 3}
    assert max(tied.values()) < 1.2 * min(tied.values())


def test_weighted_random_follows_the_scores() -> None:
    found = wins(WeightedRandomPicker("p"), [1.0, 3.0, 0.0])
    assert 0.20 < found[0] / 4_000 < 0.30
    assert found[2] == 0


def test_weighted_random_without_a_score_is_random() -> None:
    found = wins(WeightedRandomPicker("p"), [0.0, 0.0, 0.0])
    assert set(found) == {0, 1, 2}
    assert max(found.values()) < 1.2 * min(found.values())


def test_random_does_not_look_at_scores() -> None:
    found = wins(RandomPicker("p"), [9.0, 0.0])
    assert 1_800 < found[1] < 2_200


@pytest.mark.parametrize("make", [MaxScorePicker, WeightedRandomPicker, RandomPicker])
def test_fallbacks_are_others_and_a_request_repeats_itself(make: type[MaxScorePicker]) -> None:
    scores = [0.5, 0.2, 0.9, 0.9]
    order = make("p", 3).pick(asked("same"), scores)
    assert len(order) == len(set(order)) == 3
    assert list(order) == list(make("p", 3).pick(asked("same"), scores))
    assert sorted(make("p", 9).pick(asked(), scores)) == [0, 1, 2, 3]


def test_max_score_fallbacks_come_in_order() -> None:
    assert list(MaxScorePicker("p", 3).pick(asked(), [0.5, 0.2, 0.9])) == [2, 0, 1]


def test_weighted_random_fallbacks_without_a_score_come_last() -> None:
    for n in range(100):
        order = WeightedRandomPicker("p", 3).pick(asked(f"r{n}"), [0.0, 0.001, 1.0])
        assert order[2] == 0
