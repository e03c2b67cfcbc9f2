"""Near the peer, and where the adapter is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epp.core.types import LoraState
from epp.plugins.lora_affinity import LoraAffinityScorer
from epp.plugins.topology import TopologyFilter, TopologyScorer
from tests.unit.plugins.pools import asked, labelled, pods, with_loras

PEER = labelled("peer", host="h1", rack="r1", zone="z1", region="g1").endpoint
ROWS = [
    labelled("host", host="h1", rack="r1", zone="z1", region="g1"),
    labelled("rack", host="h2", rack="r1", zone="z1", region="g1"),
    labelled("zone", host="h2", zone="z1", region="g1"),
    labelled("region", region="g1"),
    labelled("far", host="h9", region="g9"),
    labelled("unknown"),
]


def test_scores_by_the_tightest_level_in_common() -> None:
    near = replace(asked(), peer=PEER)
    assert list(TopologyScorer("s").score(near, ROWS)) == [1.0, 0.20, 0.05, 0.02, 0.0, 0.0]
    assert set(TopologyScorer("s").score(asked(), ROWS)) == {0.5}  # there is no peer


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("host", ["host"]),
        ("rack", ["host", "rack"]),
        ("zone", ["host", "rack", "zone"]),
        ("region", ["host", "rack", "zone", "region"]),
    ],
)
def test_the_filter_keeps_what_is_near_enough(level: str, kept: list[str]) -> None:
    assert pods(TopologyFilter("f", level).filter(replace(asked(), peer=PEER), ROWS)) == kept


def test_the_filter_never_empties_a_pool() -> None:
    far = ROWS[4:]
    assert len(TopologyFilter("f").filter(replace(asked(), peer=PEER), far)) == 2
    assert len(TopologyFilter("f").filter(asked(), ROWS)) == 6
    nowhere = replace(asked(), peer=labelled("x").endpoint)
    assert len(TopologyFilter("f").filter(nowhere, ROWS)) == 6  # two without labels are not near


def test_adapters() -> None:
    rows = [
        with_loras("running", LoraState(frozenset({"x"}), frozenset(), 1)),
        with_loras("room", LoraState(frozenset({"y"}), frozenset(), 2)),
        with_loras("waiting", LoraState(frozenset({"y"}), frozenset({"x"}), 2)),
        with_loras("full", LoraState(frozenset({"y"}), frozenset({"z"}), 2)),
    ]
    assert list(LoraAffinityScorer("s").score(asked(lora="x"), rows)) == [1.0, 0.8, 0.6, 0.0]
    assert set(LoraAffinityScorer("s").score(asked(), rows)) == {0.5}  # the base model needs no place
