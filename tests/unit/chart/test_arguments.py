"""Every argument in a rendered pod is one that the program behind it takes, with the value that was meant."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from deploy.helm import flag_schemas
from epp.cli import parser
from sidecar.config import SidecarConfig, parse_config
from sidecar.tracing.settings import read_settings
from tests.kube import chart
from tests.kube.chart import CASES, ChartRefused, Manifest

POD_IP = {"POD_IP": "10.0.0.9"}
# router.epp.metricsDataSource; those who come with the flags may keep them in router.epp.flags
SCRAPING = frozenset(
    {
        "model-server-metrics-scheme",
        "model-server-metrics-path",
        "model-server-metrics-https-insecure-skip-verify",
    }
)


def names(arguments: list[str]) -> set[str]:
    return {
        argument.partition("=")[0].removeprefix("--") for argument in arguments if argument.startswith("--")
    }


def epp(manifests: list[Manifest]) -> Namespace:
    return parser().parse_args(["epp", *chart.container(manifests, "epp")["args"]])


def sidecar(manifests: list[Manifest], key: Path) -> SidecarConfig:
    arguments = chart.container(manifests, "sidecar")["args"]
    return parse_config([a.replace("/etc/kvpull/keys/routing-key", str(key)) for a in arguments], POD_IP)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("k" * 43)
    return path


@pytest.mark.parametrize("case", CASES)
def test_the_picker_takes_its_arguments(case: str) -> None:
    manifests = chart.render(chart.case(case))
    arguments = epp(manifests)
    given = chart.case(case)["router"].get("epp", {}).get("flags", {})
    assert names(chart.container(manifests, "epp")["args"]) - given.keys() <= flag_schemas.EPP_SET | SCRAPING
    assert arguments.drain_timeout == 120
    assert arguments.lame_duck == 5
    mounts = {m["mountPath"] for m in chart.container(manifests, "epp")["volumeMounts"]}
    for path in ("config_file", "debug_token_file", "routing_key_file"):
        assert str(getattr(arguments, path).parent) in mounts


@pytest.mark.parametrize("case", [c for c in CASES if chart.case(c).get("engine")])
def test_the_sidecar_takes_its_arguments(case: str, key: Path) -> None:
    manifests = chart.render(chart.case(case))
    config = sidecar(manifests, key)
    given = chart.case(case)["engine"].get("sidecar", {}).get("flags", {})
    assert names(chart.container(manifests, "sidecar")["args"]) - given.keys() <= flag_schemas.SIDECAR_SET
    assert config.ranks == len(chart.case(case)["router"]["modelServers"].get("targetPorts", [1]))
    assert config.pull_enabled
    assert not config.secure
    ports = {p["containerPort"] for p in chart.container(manifests, "sidecar")["ports"]}
    assert ports == {config.metrics_port, *(config.port + rank for rank in range(config.ranks))}


def test_doctor_and_calibration_take_their_arguments() -> None:
    manifests = chart.render(chart.case("everything"))
    doctor = parser().parse_args(chart.container(manifests, "doctor")["args"])
    assert doctor.url == ["https://kv-epp-siblings.llm.svc.cluster.local:9090"]
    several = chart.container(chart.minimal({"router": {"epp": {"replicas": 2}}}), "doctor")["args"]
    every = ["http://kv-epp-siblings.llm.svc.cluster.local:9090"]
    assert parser().parse_args(several).url == every, "every replica is asked"
    alone = chart.container(chart.render(chart.case("minimal")), "doctor")["args"]
    assert parser().parse_args(alone).url == ["http://kv-epp.llm.svc.cluster.local:9090"]
    assert (doctor.gateway, doctor.sidecar_metrics_port, doctor.passive) == (
        "http://gateway.example.com",
        8100,
        False,
    )
    calibrate = parser().parse_args(chart.container(manifests, "calibrate")["args"])
    assert calibrate.destination == "http://10.0.0.2:8200"
    assert calibrate.name in epp(manifests).thresholds_configmap
    assert calibrate.namespace == chart.NAMESPACE
    assert (str(calibrate.config_map), calibrate.apply) == ("/dev/termination-log", False)
    applied = parser().parse_args(chart.container(chart.render(chart.case("standby")), "calibrate")["args"])
    assert (applied.config_map, applied.apply) == (None, True)
    passive = parser().parse_args(
        chart.container(chart.render(chart.case("sidecar-proxy")), "doctor")["args"]
    )
    assert passive.passive
    through = parser().parse_args(chart.container(chart.render(chart.case("standalone")), "doctor")["args"])
    assert through.gateway == "http://kv-proxy.llm.svc.cluster.local:8081"


@pytest.mark.parametrize("snapshots", [True, False])
def test_the_doctor_asks_every_picker(snapshots: bool) -> None:
    """The headless Service has them all, standbys included; one picker has no need of it."""
    values = {
        "router": {"epp": {"replicas": 2, "haMode": "active-passive"}},
        "snapshots": {"enabled": snapshots},
    }
    manifests = chart.minimal(values)
    (url,) = parser().parse_args(chart.container(manifests, "doctor")["args"]).url
    service = chart.find(manifests, "Service", "-siblings")
    assert url == f"http://{service['metadata']['name']}.llm.svc.cluster.local:9090"
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert ports == {"every-picker": 9090} | ({"snapshots": 9004} if snapshots else {})
    one = parser().parse_args(chart.container(chart.minimal(), "doctor")["args"])
    assert one.url == ["http://kv-epp.llm.svc.cluster.local:9090"]


def test_images_start_what_the_arguments_are_for() -> None:
    """The image's entry point stands before `args`, and `command` replaces it."""
    lines = (chart.CHART.parents[2] / "Dockerfile").read_text().splitlines()
    entries = [
        json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT ")
    ]
    assert entries == [["kvpull-sidecar"], ["kvpull", "epp"]]
    manifests = chart.render(chart.case("everything"))
    assert not any("command" in chart.container(manifests, name) for name in ("epp", "sidecar"))
    assert chart.container(manifests, "doctor")["command"] == ["kvpull"]
    assert chart.container(manifests, "calibrate")["command"] == ["kvpull"]
    user = next(line for line in lines if line.startswith("USER "))
    pod = chart.find(manifests, "Deployment", "-epp")["spec"]["template"]["spec"]
    assert user == f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"


def test_where_endpoints_come_from() -> None:
    made, attached = epp(chart.minimal()), epp(chart.render(chart.case("attach")))
    assert (made.pool_name, made.pool_namespace, made.endpoint_selector) == ("kv", "llm", None)
    assert (attached.pool_name, attached.pool_namespace) == ("llama", "llm")
    without = epp(chart.render(chart.case("standalone")))
    assert (without.pool_name, without.endpoint_selector) == (None, {"app": "llama", "tier": "gpu"})
    assert without.endpoint_target_ports == [8000, 8001]


def test_one_value_drives_group_and_ports() -> None:
    """S-G02: pool, picker, rights and sidecar never disagree."""
    values = {"inferencePool": {"group": "pools.example.com"}, "epp": {"extProcPort": 9123}}
    values["modelServers"] = {"targetPorts": [{"number": 8111}]}  # type: ignore[dict-item]
    manifests = chart.minimal({"router": values, "engine": {"enabled": True, "modelName": "m"}})
    pool, arguments = chart.find(manifests, "InferencePool"), epp(manifests)
    assert pool["apiVersion"] == "pools.example.com/v1"
    assert arguments.pool_group == "pools.example.com"
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == arguments.grpc_port == 9123
    assert chart.find(manifests, "Service")["spec"]["ports"][0]["port"] == 9123
    assert "pools.example.com" in str(chart.find(manifests, "Role", "-epp")["rules"])
    assert "--pool-group=pools.example.com" in chart.container(manifests, "sidecar")["args"]
    assert "--port=8111" in chart.container(manifests, "sidecar")["args"]


@pytest.mark.parametrize(
    ("written", "meant"), [(False, False), ("false", False), (True, True), ("true", True)]
)
def test_false_is_false(written: object, meant: bool) -> None:
    """S-G07: as a boolean and as text, of the picker and of the sidecar."""
    flags = {"allow-experimental-plugins": written}
    assert epp(chart.minimal({"router": {"epp": {"flags": flags}}})).allow_experimental_plugins is meant
    engine = {"enabled": True, "modelName": "m", "sidecar": {"flags": {"enable-prefiller-sampling": written}}}
    arguments = chart.container(chart.minimal({"engine": engine}), "sidecar")["args"]
    assert f"--enable-prefiller-sampling={str(meant).lower()}" in arguments


def test_secure_serving_is_what_was_asked_for() -> None:
    assert epp(chart.minimal()).secure_serving is True
    assert epp(chart.minimal({"router": {"epp": {"secureServing": False}}})).secure_serving is False


def test_a_tenants_header_reaches_the_picker_where_it_may_not_be_got_past() -> None:
    flags = {
        "epp": {"flags": {"cache-salt-header": "X-Tenant"}},
        "inferencePool": {"failureMode": "FailClose"},
    }
    assert epp(chart.minimal({"router": flags})).cache_salt_header == "x-tenant"
    assert epp(chart.minimal({})).cache_salt_header is None


def test_numbers_keep_their_value() -> None:
    flags = {"max-body-bytes": 1e6, "ledger-max-bytes": 67108864, "ledger-keep": 8, "pull-deadline": "1.5s"}
    arguments = epp(chart.minimal({"router": {"epp": {"flags": flags}}}))
    assert (arguments.max_body_bytes, arguments.ledger_max_bytes, arguments.ledger_keep) == (
        1_000_000,
        67_108_864,
        8,
    )
    assert arguments.pull_deadline == 1.5


def test_several_of_a_flag() -> None:
    configured = {"thresholds": {"extraConfigMaps": ["b", "c"]}}
    assert epp(chart.minimal(configured)).thresholds_configmap == ["kv-epp-thresholds", "b", "c"]


def test_how_engines_are_scraped() -> None:
    default = epp(chart.minimal())
    arguments = epp(chart.render(chart.case("everything")))
    assert arguments.model_server_metrics_scheme == "https"
    assert arguments.model_server_metrics_path == "/engine/metrics"
    assert arguments.model_server_metrics_https_insecure_skip_verify is True
    said = {"metricsDataSource": {"path": "/a"}, "flags": {"model-server-metrics-path": "/b"}}
    assert epp(chart.minimal({"router": {"epp": said}})).model_server_metrics_path == "/b"
    assert (default.model_server_metrics_scheme, default.model_server_metrics_path) == ("http", "/metrics")


@pytest.mark.parametrize(("container", "service"), [("epp", "kvpull-epp"), ("sidecar", "kvpull-sidecar")])
def test_spans_go_where_the_values_say(container: str, service: str) -> None:
    """What the process makes of the variables that the chart gives it."""
    tracing = {
        "enabled": True,
        "otelExporterEndpoint": "http://collector.o11y:4318",
        "sampling": {"samplerArg": 0.25},
    }
    values = {"router": {"tracing": tracing}, "engine": {"enabled": True, "modelName": "m"}}
    found = chart.container(chart.minimal(values), container)
    assert "--tracing=true" in found["args"]
    variables = {item["name"]: item.get("value", "kv-0") for item in found["env"]}
    variables["OTEL_RESOURCE_ATTRIBUTES"] = variables["OTEL_RESOURCE_ATTRIBUTES"].replace(
        "$(POD_NAME)", variables["POD_NAME"]
    )
    order = [item["name"] for item in found["env"]]
    assert order.index("POD_NAME") < order.index("OTEL_RESOURCE_ATTRIBUTES")  # else it is not expanded
    settings = read_settings(variables, "another")
    assert settings.url == "http://collector.o11y:4318/v1/traces"
    assert settings.ratio == 0.25
    assert settings.resource == {
        "service.name": service,
        "k8s.namespace.name": "llm",
        "k8s.pod.name": "kv-0",
    }


def test_without_tracing_nothing_is_said_of_a_collector() -> None:
    manifests = chart.minimal({"engine": {"enabled": True, "modelName": "m"}})
    for name in ("epp", "sidecar"):
        found = chart.container(manifests, name)
        assert "--tracing=false" in found["args"]
        assert "OTEL" not in str(found["env"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"secure-servin": True}, "secure-servin"),
        ({"grpc-port": 1}, "grpc-port"),  # the chart's own: router.epp.extProcPort
        ({"allow-experimental-plugins": "ja"}, "allow-experimental-plugins"),
        ({"ready-fd": 3}, "ready-fd"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused_by_helm(flags: dict[str, object], told: str) -> None:
    with pytest.raises(ChartRefused, match=told):
        chart.minimal({"router": {"epp": {"flags": flags}}})
