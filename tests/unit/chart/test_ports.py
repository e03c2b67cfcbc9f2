"""S-C09, S-C10: the ports of an engine's pod, for every rank, as the chart renders them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_plugin.identity import default_ports
from tests.kube import chart
from tests.kube.chart import ChartRefused

RANKS = 8


def engine(**values: Any) -> dict[str, Any]:
    """Eight data-parallel ranks of two devices each."""
    sizing = {"dataParallelSize": RANKS, "tensorParallelSize": 2}
    ports = [{"number": 8000 + rank} for rank in range(RANKS)]
    return {
        "engine": {"enabled": True, "modelName": "m", "sizing": sizing} | values,
        "router": {"modelServers": {"targetPorts": ports}},
    }


def first_ports() -> dict[str, int]:
    """Of rank 0, by what the engine and the sidecar are told."""
    manifests = chart.minimal(engine())
    container, sidecar = chart.container(manifests, "engine"), chart.container(manifests, "sidecar")
    named = {port["name"]: port["containerPort"] for port in [*container["ports"], *sidecar["ports"]]}
    flags = dict(arg.split("=", 1) for arg in [*container["args"], *sidecar["args"]] if "=" in arg)
    events = json.loads(flags["--kv-events-config"])
    (peer,) = json.loads(flags["--kv-transfer-config"])["kv_connector_extra_config"]["secondary_tiers"]
    assert events["endpoint"] == f"tcp://*:{named['kv-events']}"
    assert events["replay_endpoint"] == f"tcp://*:{named['kv-replay']}"
    assert peer["port"] == named["p2p"] == int(flags["--p2p-connector-port"])
    assert flags["--data-parallel-size"] == str(RANKS)
    return named


def test_the_ports_of_all_ranks_are_those_that_the_picker_reckons_with_and_differ() -> None:
    named = first_ports()
    ranged = [named[name] for name in ("engine-http", "kv-events", "kv-replay", "p2p", "pull-reports")]
    ports = [first + rank for first in ranged for rank in range(RANKS)]
    ports += [named[f"serving-{rank}"] for rank in range(RANKS)] + [named["sidecar-metrics"]]
    assert len(set(ports)) == len(ports) == 6 * RANKS + 1
    for rank in range(RANKS):
        plan = default_ports(rank)
        told = (named["kv-events"] + rank, named["kv-replay"] + rank, named["p2p"] + rank)
        assert (plan.events, plan.replay, plan.p2p) == told


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"eventsPort": 7777}, r"engine\.p2pPort: port 7777 \(rank 0\) is taken by engine\.eventsPort"),
        ({"replayPort": 5564}, r"engine\.replayPort: port 5564 \(rank 0\) is taken by engine\.eventsPort"),
        ({"reportsPort": 7770}, r"engine\.reportsPort: port 7777 \(rank 7\) is taken by engine\.p2pPort"),
        ({"port": 8100}, r"engine\.port: port 8100 \(rank 0\) is taken by engine\.sidecar\.metricsPort"),
        ({"p2pPort": 8007}, r"targetPorts\[7\]: port 8007 \(rank 0\) is taken by engine\.p2pPort"),
    ],
)
def test_an_overlap_ends_the_render(values: dict[str, int], refused: str) -> None:
    with pytest.raises(ChartRefused, match=refused):
        chart.minimal(engine(**values))


def test_the_side_channel_of_nixl_has_its_ports_where_it_is_used() -> None:
    """5600 and on, one for every device of every rank."""
    values = {"eventsPort": 5615, "sidecar": {"kvConnector": "nixlv2"}}
    with pytest.raises(ChartRefused, match=r"NIXL's side channel: port 5615 \(rank 15\)"):
        chart.minimal(engine(**values))
    chart.minimal(engine(**values | {"eventsPort": 5616}))
    chart.minimal(engine(eventsPort=5615))
