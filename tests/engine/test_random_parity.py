"""Requests at random, as the router and a real vLLM understand them.

`KVPULL_RANDOM_REQUESTS` (60 for each family) says how many, `KVPULL_RANDOM_SEED` which. One that differs is a
bug of its kind: it goes to tests/parity/found.py.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.test_parity import engine_says, engine_session
from tests.parity.at_random.requests import random_cases
from tests.parity.families import FAMILIES
from tests.parity.ours import open_router_tokeniser, router_says
from tests.parity.record import REFUSED

COUNT = int(os.environ.get("KVPULL_RANDOM_REQUESTS", "60"))
SEED = os.environ.get("KVPULL_RANDOM_SEED", "1")
# what an engine answers and the router leaves alone: numbers of more than 64 bits, odd types
LEFT_ALONE = frozenset(
    ("number_range", "template_kwargs", "documents_shape", "part_shape", "multimodal_part")
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
async def test_requests_at_random(family: str, renderers: dict[str, str], models: dict[str, Path]) -> None:
    tokeniser = open_router_tokeniser(models[family])
    outcomes: Counter[str] = Counter()
    async with engine_session() as session:
        for case in random_cases(family, SEED, COUNT):
            theirs = await engine_says(session, renderers[family], case, may_fail=True)
            ours = await router_says(tokeniser, case)
            if theirs == REFUSED:
                outcomes["refused"] += 1
                continue
            assert ours == theirs or ours in LEFT_ALONE, (case.path, case.body.decode(), ours)
            outcomes["same" if ours == theirs else "left alone"] += 1
    await tokeniser.aclose()
    assert outcomes["same"] >= COUNT // 4, outcomes
    assert outcomes["left alone"] <= outcomes["same"] // 5 + 3, outcomes
