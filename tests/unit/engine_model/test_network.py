"""Fair links: no bandwidth above the bound, no byte lost, nobody idles a link that somebody wants."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.engine_model.network import FairNetwork, Flow

LINK = 50e9
STARTS = st.lists(
    st.tuples(
        st.floats(0, 2), st.integers(0, 4), st.integers(0, 4), st.floats(1e6, 2e10), st.floats(1e9, 8e10)
    ),
    min_size=1,
    max_size=12,
)


def test_one_stream_reaches_its_own_limit_and_no_more() -> None:
    network = FairNetwork(LINK)
    network.start(Flow("a", "b", 20e9, 10e9), 0.0)
    assert network.next_end_s() == pytest.approx(2.0)


def test_streams_out_of_one_source_share_its_link() -> None:
    network = FairNetwork(10e9)
    flows = [Flow("a", to, 10e9, 10e9) for to in "bcde"]
    for flow in flows:
        network.start(flow, 0.0)
    assert [flow.rate_bytes_per_s for flow in flows] == pytest.approx([2.5e9] * 4)
    assert network.next_end_s() == pytest.approx(4.0)
    assert network.finish(4.0) == flows


def test_what_a_slow_stream_leaves_goes_to_the_others() -> None:
    network = FairNetwork(10e9)
    slow, fast = Flow("a", "b", 1e9, 2e9), Flow("a", "c", 100e9, 50e9)
    network.start(slow, 0.0)
    network.start(fast, 0.0)
    assert (slow.rate_bytes_per_s, fast.rate_bytes_per_s) == pytest.approx((2e9, 8e9))
    network.cancel(slow, 0.25)
    assert fast.rate_bytes_per_s == pytest.approx(10e9)
    assert network.moved_bytes == pytest.approx(0.25 * 10e9)


@given(STARTS)
def test_links_are_never_overrun_and_every_byte_arrives(
    starts: list[tuple[float, int, int, float, float]],
) -> None:
    network, ended, total = FairNetwork(LINK), 0, 0.0
    todo = sorted(starts)
    while todo or len(network):
        next_end_s = network.next_end_s()
        if todo and (next_end_s is None or todo[0][0] <= next_end_s):
            at_s, source, destination, size, limit = todo.pop(0)
            total += size
            network.start(Flow(source, 10 + destination, size, limit), at_s)
        else:
            assert next_end_s is not None
            done = network.finish(next_end_s)
            assert done  # the promised end comes when it was promised
            ended += len(done)
        used: dict[object, float] = defaultdict(float)
        for flow in network.flows:
            assert 0 < flow.rate_bytes_per_s <= flow.limit_bytes_per_s
            used[flow.source] += flow.rate_bytes_per_s
            used[flow.destination] += flow.rate_bytes_per_s
        assert all(rate <= LINK * (1 + 1e-9) for rate in used.values())
        for flow in network.flows:  # max-min: whoever is below the limit has a full link
            full = max(used[flow.source], used[flow.destination]) >= LINK * (1 - 1e-9)
            assert full or flow.rate_bytes_per_s >= flow.limit_bytes_per_s * (1 - 1e-9)
    assert ended == len(starts)
    assert network.moved_bytes == pytest.approx(total)


def test_time_does_not_run_backwards() -> None:
    network = FairNetwork(LINK)
    network.start(Flow("a", "b", 1e9, 1e9), 5.0)
    with pytest.raises(ValueError, match="forward"):
        network.finish(4.0)
