"""S-C09, S-C10 as far as they go without a chart: one rule for a rank's ports, and none meets another."""

from __future__ import annotations

import pytest

from engine_plugin import wire
from engine_plugin.identity import IdentityError, default_ports, rank_of


def test_ports_of_all_ranks_of_a_pod_differ() -> None:
    """Up to 100 ranks; from there on a rank's events port would be another one's replay port."""
    plans = [default_ports(rank) for rank in range(100)]
    ports = [port for plan in plans for port in (plan.events, plan.replay, plan.p2p)]
    assert len(set(ports)) == 300
    assert default_ports(0) != default_ports(1)
    assert default_ports(100).events == default_ports(0).replay


def test_ports_follow_the_rank_and_an_impossible_rank_is_refused() -> None:
    assert default_ports(3).events == wire.EVENTS_PORT + 3
    assert rank_of(8003, 8000, 4) == 3
    for port in (7999, 8004):
        with pytest.raises(IdentityError):
            rank_of(port, 8000, 4)
    with pytest.raises(IdentityError):
        default_ports(-1)
