"""Which legs are run: noisy lengths are repeated, both legs of them, and no more than was allowed."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from epp.calibrate.fit import PULL, RECOMPUTE, uncertainty
from epp.calibrate.measure import CONTROL, Leg, Measured, Pair, Settings
from epp.calibrate.probe import Engine, SourceName

LENGTHS = (512, 1024)
NOISY, CALM_AFTER = 512, 4  # the first samples of a noisy length are anything


class Scripted(Pair):
    """Legs without engines: times by length and by how often the leg has run."""

    def __init__(self, settings: Settings, *, calms: bool) -> None:
        super().__init__(cast(Engine, None), cast(Engine, None), SourceName("h", 1), settings)
        self.calms, self.ran = calms, Counter[tuple[str, int]]()

    def _leg(self, leg: Leg, measured: Measured) -> None:
        kind = RECOMPUTE if leg.kind == CONTROL else leg.kind
        samples = measured.samples[kind].setdefault(leg.tokens, [])
        self.ran[leg.kind, leg.tokens] += 1
        disturbed = leg.tokens == NOISY and kind == PULL and not (self.calms and len(samples) >= CALM_AFTER)
        samples.append(100.0 * (1 + 1.5 * (len(samples) % 3)) if disturbed else 100.0)


def run(*, calms: bool, **changed: Any) -> tuple[Measured, Counter[tuple[str, int]]]:
    pair = Scripted(Settings(LENGTHS, 4, (1, 9), seed=1, **changed), calms=calms)
    return pair.run(), pair.ran


def test_only_the_noisy_length_is_repeated_until_it_is_known() -> None:
    measured, ran = run(calms=True, max_repetitions=40, max_noise=0.15)
    counts = {leg: ran[leg, NOISY] - ran[leg, 1024] for leg in (RECOMPUTE, PULL)}
    assert counts[PULL] == counts[RECOMPUTE] > 0, "a drift must hit both"
    assert uncertainty(measured.samples[PULL][NOISY]) <= 0.15
    assert len(measured.samples[PULL][1024]) == 4


@pytest.mark.parametrize(("most", "wanted"), [(0, 4), (4, 4), (9, 9)])
def test_no_more_often_than_was_allowed(most: int, wanted: int) -> None:
    measured, _ = run(calms=False, max_repetitions=most)
    assert len(measured.samples[PULL][NOISY]) == wanted
    assert len(measured.samples[PULL][1024]) == 4
