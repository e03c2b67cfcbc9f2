"""Rows altered at random, from the wire to the claim: refused, or an index that is sound and follows its
engine."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from epp.core.adoption import AdoptionRefused, ExportedView
from epp.core.cache_view import CacheView
from epp.core.index_choice import IndexMaker
from epp.core.types import CacheTier, ClaimState
from epp.siblings import wire
from tests.unit.index.conftest import make_index as make_index
from tests.unit.index.test_adoption import A, Engine, export_of, match, removed, stored

BLOCKS = 30


def engine() -> Engine:
    engine = Engine()
    engine.grow(BLOCKS)
    engine.publish(stored(0, 1, 2, tier=CacheTier.CPU))
    engine.publish(removed(7))
    return engine


def altered(exported: ExportedView, scheme: str, changes: list[tuple[int, int]]) -> ExportedView | None:
    """The row after some of its bytes were changed on the way; None: the format already refuses it."""
    row = wire.Row(A, "10.0.0.1", 5557, exported)
    raw = bytearray(b"".join(wire.encode_row(row)))
    for at, value in changes:
        raw[at % len(raw)] = value
    try:
        length = wire.decode_length(bytes(raw[: wire.LENGTH_BYTES]))
        split = wire.LENGTH_BYTES + length
        header = wire.decode_header(bytes(raw[wire.LENGTH_BYTES : split]))
        if not isinstance(header, wire.RowHeader):
            return None
        return wire.build_row(header, bytes(raw[split:]), scheme).view
    except wire.FormatError:
        return None


@pytest.mark.parametrize("seed_matches", [True, False])
@given(
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3),
    published=st.integers(0, 6),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_row_breaks_the_index_or_claims_without_the_engine(
    make_index: IndexMaker, seed_matches: bool, changes: list[tuple[int, int]], published: int
) -> None:
    source, index = engine(), make_index(b"s" * 16)
    sibling = CacheView(make_index(b"s" * 16 if seed_matches else b"t" * 16))
    sibling.add_endpoint(A, has_replay=True)
    view = altered(export_of(sibling, source), make_index.scheme, changes)
    cache = CacheView(index)
    cache.add_endpoint(A, has_replay=True)
    if view is not None:
        try:
            cache.adopt(A, view)
        except AdoptionRefused:
            assert cache.stats(A).index.device_blocks == 0
        index.check_integrity()
    assert not match(cache).state.has_claim
    for number in range(published):
        source.publish(stored(BLOCKS + number))
    source.connect(cache)
    index.check_integrity()
    assert match(cache).state.has_claim
    if not changes and seed_matches:
        assert (match(cache).state, match(cache).blocks) == (ClaimState.LIVE, 7)
    cache.remove_endpoint(A)
    index.sweep(1_000)
    index.check_integrity()
    assert len(index) == 0  # type: ignore[arg-type]
