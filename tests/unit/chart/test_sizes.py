"""CPU tier, /dev/shm and memory of an engine's pod are the numbers of `kvpull size`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_plugin.vllm.tier_config import TierConfig
from epp.sizing.kv_layout import KvLayout
from epp.sizing.plan import GIB, Machine, Sizes, Workload, size
from tests.kube import chart
from tests.kube.chart import ChartRefused, Manifest

WORKLOAD = Workload(context_tokens=16_384, concurrency=16, working_set_tokens=1 << 20, pods=4)
# kvBytesPerToken, deviceKvTokens, dataParallelSize, cpuTierGiB, baseMemoryGiB
GRID = [
    (131_072, 200_000, 1, None, 64.0),
    (92_628, 1_220_000, 1, None, 64.0),
    (57_344, 37_449, 2, None, 16.5),
    (41_472, 1_220_000, 8, None, 64.0),
    (131_072, 500_000, 1, 88.0, 64.0),  # the guide's 88 GiB
    (131_072, 500_000, 4, 0.75, 2.0),
    (1, 1, 1, None, 0.5),
    *(
        (131_072, 4096 * tier, 1, None, 64.0) for tier in (1, 2, 11, 12, 22, 33)
    ),  # tiers of whole GiB, x 12/11
    *((131_072, 100_000, 1, float(tier), 64.0) for tier in (11, 22, 55, 110)),
]


def sizes(per_token: int, tokens: int, ranks: int, tier: float | None, base: float) -> Sizes:
    machine = Machine(
        device_kv_tokens=tokens,
        engines_per_pod=ranks,
        base_memory_bytes=round(base * GIB),
        cpu_tier_bytes=None if tier is None else round(tier * GIB),
    )
    return size(KvLayout(per_token, 0, 0), WORKLOAD, machine)


def engine(sizing: dict[str, Any]) -> dict[str, Any]:
    ports = [{"number": 8000 + rank} for rank in range(sizing.get("dataParallelSize", 1))]
    return {
        "engine": {"enabled": True, "modelName": "m", "sizing": sizing},
        "router": {"modelServers": {"targetPorts": ports}},
    }


def shm_bytes(manifests: list[Manifest]) -> int:
    volumes = chart.find(manifests, "Deployment", "-engine")["spec"]["template"]["spec"]["volumes"]
    shm = next(volume["emptyDir"] for volume in volumes if volume["name"] == "shm")
    assert shm["medium"] == "Memory"
    return int(shm["sizeLimit"])


def tier_bytes(manifests: list[Manifest]) -> int:
    flag = next(a for a in chart.container(manifests, "engine")["args"] if "--kv-transfer-config=" in a)
    config = json.loads(flag.partition("=")[2])["kv_connector_extra_config"]
    assert [tier["port"] for tier in config["secondary_tiers"]] == [7777]
    return int(config["cpu_bytes_to_use"])


@pytest.mark.parametrize(("per_token", "tokens", "ranks", "tier", "base"), GRID)
def test_the_same_numbers(per_token: int, tokens: int, ranks: int, tier: float | None, base: float) -> None:
    wanted = sizes(per_token, tokens, ranks, tier, base)
    sizing: dict[str, Any] = {"kvBytesPerToken": per_token, "deviceKvTokens": tokens, "baseMemoryGiB": base}
    sizing |= {"dataParallelSize": ranks, "cpuTierGiB": tier or 0}
    manifests = chart.minimal(engine(sizing))
    assert tier_bytes(manifests) == wanted.cpu_tier_bytes
    assert shm_bytes(manifests) == wanted.pod_shm_bytes
    resources = chart.container(manifests, "engine")["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == str(wanted.pod_memory_bytes)
    assert wanted.pod_memory_bytes > wanted.pod_shm_bytes  # /dev/shm counts as the pod's memory


def transfer_config(manifests: list[Manifest]) -> Any:
    flag = next(a for a in chart.container(manifests, "engine")["args"] if "--kv-transfer-config=" in a)
    return json.loads(flag.partition("=")[2])["kv_connector_extra_config"]


def test_our_tier_takes_its_settings() -> None:
    manifests = chart.minimal(engine({}))
    config = transfer_config(manifests)
    assert config["spec_name"] == "PullOffloadingSpec"
    settings = {name: value for name, value in config["secondary_tiers"][0].items() if name != "type"}
    parsed = TierConfig.parse(settings)
    assert (parsed.port, parsed.reports_port, parsed.insecure) == (7777, 5757, False)
    mounts = {m["mountPath"]: m for m in chart.container(manifests, "engine")["volumeMounts"]}
    mount = mounts[parsed.peer_key_file.rpartition("/")[0]]
    assert "subPath" not in mount, "the kubelet would not renew it, and a new key would need a restart"


def test_vllm_s_own_tier() -> None:
    config = transfer_config(chart.render(chart.case("standby")))
    assert config["spec_name"] == "TieringOffloadingSpec"
    assert config["secondary_tiers"] == [{"type": "p2p", "host": "$(POD_IP)", "port": 7777}]


def test_other_resources_stay() -> None:
    values = engine({}) | {"engine": {"enabled": True, "modelName": "m", "resources": {"limits": {"gpu": 4}}}}
    limits = chart.container(chart.minimal(values), "engine")["resources"]["limits"]
    assert limits["gpu"] == 4
    assert int(limits["memory"]) > 0


def test_shared_memory_below_the_tiers_is_refused() -> None:
    with pytest.raises(ChartRefused, match=r"/dev/shm \(\d+ bytes\) is below the pod's CPU tiers"):
        chart.minimal(engine({"cpuTierGiB": 88, "shmGiB": 64}))
    assert shm_bytes(chart.minimal(engine({"cpuTierGiB": 88, "shmGiB": 96}))) == 96 * GIB


def test_a_port_for_every_rank() -> None:
    values = engine({"dataParallelSize": 2})
    values["router"]["modelServers"]["targetPorts"].pop()
    with pytest.raises(ChartRefused, match="one port for each of engine"):
        chart.minimal(values)


def test_engines_can_exchange_blocks() -> None:
    """Seed, block size and addresses: what the doctor would complain of otherwise."""
    container = chart.container(chart.minimal(engine({})), "engine")
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["PYTHONHASHSEED"] == "0"
    assert env["VLLM_P2P_SIDE_CHANNEL_HOST"] == env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    assert "--block-size=64" in container["args"]
    flag = next(a for a in container["args"] if a.startswith("--kv-events-config="))
    events = json.loads(flag.partition("=")[2])
    assert events["topic"] == "kv@$(POD_IP):8000@m"  # the port that pickers know: the sidecar's
    assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://*:5557", "tcp://*:5657")
    assert container["env"][0]["name"] == "POD_IP"  # before what is made of it
