"""Ten schedules a layout, of those that `make soak` runs 200 of: each kind of fault, and one more."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from benchmarks.soak_transport import Field, soak
from benchmarks.transport_schedules import BLOCKS, FAULTS, LAYOUTS, LINE_FAULTS, Schedule

KINDS = FAULTS + LINE_FAULTS


def drawn(seed: int) -> Schedule:
    """Every fault in turn, alternately in the conversation and in the move."""
    random = Random(seed)
    bytes_in = random.randrange(7000) if seed % 2 else None
    return Schedule(KINDS[seed % len(KINDS)], bytes_in, random.randrange(1, 8), 0.2, bool(seed % 3))


@pytest.mark.parametrize("name", LAYOUTS)
async def test_a_pull_that_breaks_anywhere_does_no_harm(name: str) -> None:
    tally = await soak(10, 0, layout=LAYOUTS[name], forced=drawn)
    assert tally.losses == {}, tally.losing_seeds
    assert tally.schedules == 10
    assert set(tally.faults) == set(KINDS)
    assert tally.blocks_verified == 10 * BLOCKS
    assert (tally.packed_moves >= 10) == (name == "packed")


async def test_a_byte_that_lands_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the check that finds nothing above finds one byte here."""
    real = Field.relent

    def late(field: Field, own_mover: int) -> None:
        real(field, own_mover)
        if (field.exposed == 0xA5).all():
            field.exposed[5, 7] = np.uint8(1)

    monkeypatch.setattr(Field, "relent", late)
    quiet = Schedule("cut", None, 2, 0.0, fresh_session=False)
    tally = await soak(1, 0, forced=lambda _: quiet)
    assert tally.losses == {"wrong": 1}
