"""Which legs are run: noisy lengths are repeated, both legs of them, and no more than was allowed."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from epp.calibrate import measure
from epp.calibrate.fit import PULL, RECOMPUTE, uncertainty
from epp.calibrate.measure import CONTROL, Leg, Measured, Pair, Settings
from epp.calibrate.probe import Counters, Engine, ProbeError, SourceName, Timed

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


class OneEngine:
    """Counts one byte a token that it pulls; gives the n-th pull up when all of it was sent."""

    def __init__(self, gives_up: dict[int, str] | None = None, lost_bytes: int = 0) -> None:
        self.gives_up, self.lost_bytes = gives_up or {}, lost_bytes
        self.pulls, self.bytes, self.failed = 0, 0, Counter[str]()

    def complete(self, tokens: list[int], salt: str, source: SourceName | None = None) -> Timed:
        if source is None:
            return Timed(100.0, 0)
        self.pulls += 1
        peer.bytes += len(tokens) - 1
        if reason := self.gives_up.get(self.pulls):
            self.failed[reason] += 1
            return Timed(5_000.0, 0)
        self.bytes += len(tokens) - 1 - self.lost_bytes
        return Timed(10.0, len(tokens) - 1)

    def counters(self) -> Counters:
        return Counters(self.bytes, self.bytes, None, {"instance": "x"}, dict(self.failed))


peer = OneEngine()


def measured_with(destination: OneEngine, monkeypatch: pytest.MonkeyPatch) -> Measured:
    monkeypatch.setattr(measure, "_COUNTERS_AGREE_S", 0.0)
    source, taker = cast(Engine, peer), cast(Engine, destination)
    return Pair(source, taker, SourceName("h", 1), Settings(LENGTHS, 4, (1, 9), seed=1)).run()


def test_a_pull_that_the_engine_gave_up_is_left_out_and_the_rest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source had served it all, which was taken for other traffic and ended the measurement."""
    measured = measured_with(OneEngine({5: "timeout"}), monkeypatch)
    assert [text.partition(": ")[2] for text in measured.discarded] == [
        "the destination gave it up (timeout)"
    ]
    kept = [ms for samples in measured.samples[PULL].values() for ms in samples]
    assert kept == [10.0] * 7


def test_bytes_that_nobody_took_are_other_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProbeError, match="other traffic"):
        measured_with(OneEngine(lost_bytes=10), monkeypatch)
