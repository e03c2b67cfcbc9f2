"""Every suite of the index runs on each implementation; one that is not built here is skipped aloud."""

from __future__ import annotations

import pytest

from epp.core.index_choice import COMPILED, PURE, IndexMaker, available_indexes


@pytest.fixture(params=[PURE, COMPILED])
def make_index(request: pytest.FixtureRequest) -> IndexMaker:
    maker = available_indexes().get(request.param)
    if maker is None:
        pytest.skip(f"the {request.param} index is not built here (needs Cython and a C compiler)")
    return maker
