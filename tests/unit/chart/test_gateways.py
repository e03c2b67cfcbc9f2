"""What each gateway gets, and what it cannot do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.envoy import bootstrap, find_binary
from deploy.local.ports import AddressPlan
from epp.extproc import wire as extproc_wire
from sidecar import wire as sidecar_wire
from tests.kube import chart
from tests.kube.chart import ChartRefused, Manifest

STRIPPED = {*sidecar_wire.ROUTING_HEADERS, extproc_wire.DESTINATION}


def removed(filter_config: Any) -> set[str]:
    mutations = filter_config["mutations"]["request_mutations"]
    return {mutation["remove"] for mutation in mutations}


def test_istio() -> None:
    manifests = chart.render(chart.case("istio"))
    rule = chart.find(manifests, "DestinationRule")["spec"]
    assert rule["host"] == "kv-epp.llm.svc.cluster.local"
    assert rule["trafficPolicy"] == {
        "connectionPool": {"http": {"maxRequestsPerConnection": 256000}},
        "tls": {"mode": "SIMPLE", "insecureSkipVerify": True},
    }
    strip = chart.find(manifests, "EnvoyFilter")
    assert strip["metadata"]["namespace"] == "istio-system"
    assert strip["spec"]["workloadSelector"]["labels"] == {"istio": "ingressgateway"}
    patch = strip["spec"]["configPatches"][0]["patch"]
    assert patch["operation"] == "INSERT_FIRST"  # before the picker is asked: it sets the same names
    assert removed(patch["value"]["typed_config"]) == STRIPPED


def test_istio_in_plain() -> None:
    manifests = chart.minimal({"provider": {"name": "istio"}, "router": {"epp": {"secureServing": False}}})
    assert chart.find(manifests, "DestinationRule")["spec"]["trafficPolicy"]["tls"] == {"mode": "DISABLE"}
    assert "EnvoyFilter" not in chart.kinds(manifests)


def test_gke() -> None:
    manifests = chart.render(chart.case("gke"))
    for kind in ("HealthCheckPolicy", "GCPBackendPolicy"):
        target = chart.find(manifests, kind)["spec"]["targetRef"]
        assert target == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "kv"}
    health = chart.find(manifests, "HealthCheckPolicy")["spec"]["default"]["config"]
    assert health["httpHealthCheck"] == {"requestPath": "/health", "port": 8000}
    assert chart.find(manifests, "GCPBackendPolicy")["spec"]["default"] == {"timeoutSec": 3600}
    assert "timeouts" not in chart.find(manifests, "HTTPRoute")["spec"]["rules"][0]


def test_kgateway() -> None:
    manifests = chart.render(chart.case("kgateway"))
    rule = chart.find(manifests, "HTTPRoute")["spec"]["rules"][0]
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "kv"}
    assert rule["backendRefs"] == [pool]
    assert rule["timeouts"] == {"request": "3600s"}
    assert "filters" not in rule  # a route's header changes come after the picker's


@pytest.mark.parametrize("provider", ["gke", "kgateway"])
def test_a_gateway_that_only_speaks_tls(provider: str) -> None:
    """S-G09."""
    with pytest.raises(ChartRefused, match=f"{provider} always speaks TLS to a picker"):
        chart.minimal({"provider": {"name": provider}, "router": {"epp": {"secureServing": False}}})


def test_a_route_to_the_pool() -> None:
    route = chart.find(chart.render(chart.case("istio")), "HTTPRoute")["spec"]
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "inference-gateway"}
    assert route["parentRefs"] == [parent | {"namespace": "gateways"}]
    match = route["rules"][0]["matches"][0]
    assert match["headers"] == [{"type": "Exact", "name": "x-model", "value": "llama"}]


def test_what_happens_while_no_picker_answers_is_said() -> None:
    """S-G10, S-G11: never an API default."""
    pool = chart.find(chart.minimal(), "InferencePool")
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
    closed = chart.minimal({"router": {"inferencePool": {"failureMode": "FailClose"}}})
    assert chart.find(closed, "InferencePool")["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    with pytest.raises(ChartRefused, match="failureMode"):
        chart.minimal({"router": {"inferencePool": {"failureMode": "FailClosed"}}})


def test_the_picker_s_port_says_what_it_speaks() -> None:
    def protocol(secure: bool) -> Any:
        service = chart.find(chart.minimal({"router": {"epp": {"secureServing": secure}}}), "Service")
        return {p["name"]: p["appProtocol"] for p in service["spec"]["ports"]}["grpc-ext-proc"]

    assert (protocol(True), protocol(False)) == ("http2", "kubernetes.io/h2c")


def test_attached_and_without_a_pool() -> None:
    assert "InferencePool" not in chart.kinds(chart.render(chart.case("attach")))
    assert "InferencePool" not in chart.kinds(chart.render(chart.case("standalone")))
    with pytest.raises(ChartRefused, match="give the name of the pool to attach to"):
        chart.minimal({"router": {"inferencePool": {"create": False}}})


# --- standalone Envoy ------------------------------------------------------------------------------


def envoy_config(manifests: list[Manifest]) -> Any:
    return yaml.safe_load(chart.find(manifests, "ConfigMap", "-proxy")["data"]["envoy.yaml"])


def filters(config: Any) -> dict[str, Any]:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return {item["name"]: item["typed_config"] for item in manager["http_filters"]}


def clusters(config: Any) -> dict[str, Any]:
    return {cluster["name"]: cluster for cluster in config["static_resources"]["clusters"]}


def test_envoy_is_configured_as_in_the_local_fleet() -> None:
    ours = envoy_config(chart.render(chart.case("sidecar-proxy")))
    local = bootstrap(AddressPlan().control)
    names = [name for name in filters(ours) if name != "envoy.filters.http.health_check"]
    assert names == list(filters(local))
    for name in names:
        assert filters(ours)[name] == filters(local)[name], name
    mine, theirs = clusters(ours), clusters(local)
    assert mine["destinations"] == theirs["destinations"]
    moved = ("type", "load_assignment")
    assert {k: v for k, v in mine["picker"].items() if k not in moved} == {
        k: v for k, v in theirs["picker"].items() if k not in moved
    }


def test_routing_headers_are_removed_before_the_picker_is_asked() -> None:
    found = filters(envoy_config(chart.render(chart.case("standalone"))))
    assert removed(found["envoy.filters.http.header_mutation"]) == STRIPPED
    names = list(found)
    assert names.index("envoy.filters.http.header_mutation") < names.index("envoy.filters.http.ext_proc")


@pytest.mark.parametrize("case", ["standalone", "sidecar-proxy"])
def test_the_real_envoy_takes_it(case: str, tmp_path: Path) -> None:
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(envoy_config(chart.render(chart.case(case)))))
    command = [str(find_binary()), "--mode", "validate", "-c", str(path), "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_envoy_beside_the_picker_and_apart() -> None:
    beside, apart = chart.render(chart.case("sidecar-proxy")), chart.render(chart.case("standalone"))
    address = {}
    for name, manifests in (("beside", beside), ("apart", apart)):
        picker = clusters(envoy_config(manifests))["picker"]
        endpoint = picker["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        address[name] = endpoint["address"]["socket_address"]
        assert ("transport_socket" in picker) is (name == "beside")  # `standalone` switches TLS off
    assert address["beside"] == {"address": "127.0.0.1", "port_value": 9002}
    assert address["apart"] == {"address": "kv-epp.llm.svc.cluster.local", "port_value": 9002}
    names = [m["metadata"]["name"] for m in beside if m["kind"] == "Deployment"]
    assert names == ["kv-epp"]


def test_envoy_rolls_with_its_configuration() -> None:
    def checksum(port: int) -> Any:
        values = chart.merged(chart.case("standalone"), {"router": {"proxy": {"port": port}}})
        deployment = chart.find(chart.render(values), "Deployment", "-proxy")
        return deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert checksum(8081) != checksum(8082)
