"""Who may reach which port: a matrix, decided as a network plugin would."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kube import chart
from tests.kube.chart import ChartRefused, Manifest

GATEWAY = {"app": "gateway"}
PROMETHEUS = {"app": "prometheus"}
ENGINE = {"app": "llama"}
EPP = {
    "app.kubernetes.io/name": "kvpull",
    "app.kubernetes.io/instance": "kv",
    "app.kubernetes.io/component": "epp",
}
JOB = EPP | {"app.kubernetes.io/component": "job"}
OTHER = {"app": "other"}
ASKING = {
    "gateway": GATEWAY,
    "prometheus": PROMETHEUS,
    "engine": ENGINE,
    "epp": EPP,
    "job": JOB,
    "other": OTHER,
}

VALUES = {
    "router": {"epp": {"replicas": 2}},
    "networkPolicy": {
        "enabled": True,
        "gateway": [{"podSelector": {"matchLabels": GATEWAY}}],
        "monitoring": [{"podSelector": {"matchLabels": PROMETHEUS}}],
    },
}
ALLOWED = {
    "epp": {
        9002: {"gateway"},
        9003: {"gateway"},
        9090: {"prometheus", "job"},
        9004: {"epp"},
    },
    "engine": {
        8000: {"gateway", "epp", "engine", "prometheus", "job"},
        8100: {"prometheus", "job", "engine"},
        8200: {"job", "engine"},
        5557: {"epp", "job", "engine"},
        5657: {"epp", "engine"},
        7777: {"job", "engine"},
        5757: {"epp", "engine"},
        40001: {"engine"},  # what the engines' transport chose
    },
}


def selects(peer: dict[str, Any], labels: dict[str, str]) -> bool:
    return bool(peer["podSelector"]["matchLabels"].items() <= labels.items())


def may(policy: Manifest, labels: dict[str, str], port: int) -> bool:
    for rule in policy["spec"]["ingress"]:
        ports = [(p["port"], p.get("endPort", p["port"])) for p in rule.get("ports", [])]
        named = not ports or any(low <= port <= high for low, high in ports)
        if named and ("from" not in rule or any(selects(peer, labels) for peer in rule["from"])):
            return True
    return False


@pytest.mark.parametrize(
    ("target", "port"), [(target, port) for target, rows in ALLOWED.items() for port in rows]
)
def test_who_reaches_a_port(target: str, port: int) -> None:
    policy = chart.find(chart.minimal(VALUES), "NetworkPolicy", f"-{target}")
    found = {name for name, labels in ASKING.items() if may(policy, labels, port)}
    assert found == ALLOWED[target][port]


def test_policies_select_the_pods_they_are_for() -> None:
    manifests = chart.render(chart.case("everything"))
    for name in ("epp", "engine"):
        policy = chart.find(manifests, "NetworkPolicy", f"-{name}")
        labels = chart.find(manifests, "Deployment", f"-{name}")["spec"]["template"]["metadata"]["labels"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    for kind in ("Job", "Pod"):
        found = chart.find(manifests, kind)
        labels = found.get("spec", {}).get("template", found)["metadata"]["labels"]
        assert JOB.items() <= labels.items()


def test_nobody_reaches_a_job() -> None:
    policy = chart.find(chart.minimal(VALUES), "NetworkPolicy", "-jobs")["spec"]
    assert policy["podSelector"]["matchLabels"] == JOB
    assert (policy["policyTypes"], policy.get("ingress")) == (["Ingress"], None)


def test_what_a_picker_may_ask() -> None:
    egress = chart.find(chart.render(chart.case("everything")), "NetworkPolicy", "-epp")["spec"]["egress"]
    dns, api, collector, engines, siblings = egress
    assert [p["port"] for p in dns["ports"]] == [53, 53]
    assert api == {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "ports": [{"port": 443}, {"port": 6443}]}
    assert collector == {"ports": [{"port": 4318}]}
    assert engines == {"to": [{"podSelector": {"matchLabels": {"app": "llama"}}}]}
    assert [p["port"] for p in siblings["ports"]] == [9004]


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://c:4318", 4318),
        ("https://c.example.com/otlp", 443),
        ("http://c", 80),
        ("http://[fd00::1]:99", 99),
    ],
)
def test_pickers_reach_the_collector_and_only_if_there_is_one(url: str, port: int) -> None:
    def ports(values: dict[str, Any]) -> list[int]:
        policy = chart.find(chart.minimal(chart.merged(VALUES, values)), "NetworkPolicy", "-epp")["spec"]
        return [p["port"] for rule in policy["egress"] if "to" not in rule for p in rule["ports"]]

    tracing = {"enabled": True, "otelExporterEndpoint": url}
    assert ports({"router": {"tracing": tracing}}) == [53, 53, 443, 6443, port]
    assert ports({}) == [53, 53, 443, 6443]


def test_data_parallel_ranks_have_their_ports() -> None:
    ports = {"router": {"modelServers": {"targetPorts": [{"number": 8000}, {"number": 8001}]}}}
    policy = chart.find(chart.minimal(chart.merged(VALUES, ports)), "NetworkPolicy", "-engine")
    assert may(policy, EPP, 5558)
    assert may(policy, EPP, 8001)
    assert not may(policy, EPP, 5559)


def test_a_policy_that_locks_everybody_out_is_refused() -> None:
    with pytest.raises(ChartRefused, match="say who the gateway is"):
        chart.minimal({"networkPolicy": {"enabled": True}})
