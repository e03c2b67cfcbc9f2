"""Ten schedules such as `make soak` runs two hundred of: one for each kind of fault, and one more."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from benchmarks.soak_transport import BLOCKS, FAULTS, LINE_FAULTS, Field, Schedule, soak

KINDS = FAULTS + LINE_FAULTS


def drawn(seed: int) -> Schedule:
    """Every fault in turn, alternately in the conversation and in the move."""
    random = Random(seed)
    bytes_in = random.randrange(7000) if seed % 2 else None
    return Schedule(KINDS[seed % len(KINDS)], bytes_in, random.randrange(1, 8), 0.2, bool(seed % 3))


async def test_a_pull_that_breaks_anywhere_does_no_harm() -> None:
    tally = await soak(10, 0, forced=drawn)
    assert tally.losses == {}, tally.losing_seeds
    assert tally.schedules == 10
    assert set(tally.faults) == set(KINDS)
    assert tally.blocks_verified == 10 * BLOCKS


async def test_a_byte_that_lands_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the check that finds nothing above finds one byte here."""
    real = Field.relent

    def late(field: Field, own_mover: int) -> None:
        real(field, own_mover)
        array = field.consumer.store.tier.array
        if (array[:BLOCKS] == 0xA5).all():
            array[5, 7] = np.uint8(1)

    monkeypatch.setattr(Field, "relent", late)
    quiet = Schedule("cut", None, 2, 0.0, fresh_session=False)
    tally = await soak(1, 0, forced=lambda _: quiet)
    assert tally.losses == {"wrong": 1}
