"""What the chart renders is valid for three Kubernetes versions, field by field, and runs restricted."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.kube import chart
from tests.kube.chart import CASES, Manifest
from tests.kube.kubectl import tool_path

VERSIONS = ("1.29", "1.34", "1.37")
CRDS = Path(__file__).parents[2] / "kube" / "crds.yaml"
# of others: no schema is at hand, test_gateways and test_monitoring look at them field by field
FOREIGN = {
    "gateway.networking.k8s.io/v1",
    "networking.istio.io/v1",
    "networking.istio.io/v1alpha3",
    "networking.gke.io/v1",
    "monitoring.coreos.com/v1",
    "monitoring.googleapis.com/v1",
}


def strict(schema: Any) -> Any:
    """A structural schema in which an unknown field is an error."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items() if not key.startswith("x-")}
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found


def crd_schemas() -> dict[str, Any]:
    return {
        crd["spec"]["names"]["kind"]: strict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        for crd in yaml.safe_load_all(CRDS.read_text())
    }


def check(manifest: Manifest, version: str) -> None:
    own = crd_schemas().get(manifest["kind"])
    if own is not None:
        jsonschema.validate(manifest, own)
    if manifest["kind"] == "InferencePool":
        numbers = [port["number"] for port in manifest["spec"]["targetPorts"]]
        assert len(numbers) == len(set(numbers))  # the CRD's two rules in CEL
        assert manifest["spec"]["endpointPickerRef"]["port"]["number"] > 0
    elif own is None and manifest["apiVersion"] not in FOREIGN:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_manifest_is_valid(case: str, version: str) -> None:
    for manifest in chart.render(chart.case(case)):
        check(manifest, version)


def test_a_misspelt_field_is_found() -> None:
    manifests = copy.deepcopy(chart.minimal())
    pool, deployment = chart.find(manifests, "InferencePool"), chart.find(manifests, "Deployment")
    pool["spec"]["targetPort"] = pool["spec"].pop("targetPorts")
    with pytest.raises(jsonschema.ValidationError):
        check(pool, VERSIONS[0])
    deployment["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment, VERSIONS[0])


@pytest.mark.parametrize("case", CASES)
def test_helm_lint_finds_nothing(case: str) -> None:
    command = [str(tool_path("helm")), "lint", "--strict", str(chart.CHART), "-f", "-"]
    values = json.dumps(chart.case(case))
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", CASES)
def test_names_and_selectors_fit_together(case: str) -> None:
    manifests = chart.render(chart.case(case))
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(names) == len(set(names))
    assert {m["metadata"]["namespace"] for m in manifests} - {"istio-system"} == {chart.NAMESPACE}
    labels = {
        m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"]
        for m in manifests
        if m["kind"] == "Deployment"
    }
    ports = {
        m["metadata"]["name"]: {
            p["name"] for c in chart.containers(m["spec"]["template"]["spec"]) for p in c.get("ports", [])
        }
        for m in manifests
        if m["kind"] == "Deployment"
    }
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            assert (
                manifest["spec"]["selector"]["matchLabels"].items()
                <= labels[manifest["metadata"]["name"]].items()
            )
        if manifest["kind"] == "Service":
            selected = [
                n for n, found in labels.items() if manifest["spec"]["selector"].items() <= found.items()
            ]
            assert len(selected) == 1, manifest
            targets = {
                p["targetPort"] for p in manifest["spec"]["ports"] if isinstance(p.get("targetPort"), str)
            }
            assert targets <= ports[selected[0]]


def mounted(manifests: list[Manifest]) -> set[str]:
    """Secrets and ConfigMaps that pods need."""
    found = set()
    for _, spec in chart.pods(manifests):
        for volume in spec.get("volumes", []):
            found |= {volume["secret"]["secretName"]} if "secret" in volume else set()
            found |= {volume["configMap"]["name"]} if "configMap" in volume else set()
    return found


# Secrets that a values file names, and its user makes
GIVEN = {
    "attach": {"picker-tls"},
    "standalone": {"tokenizer"},
    "everything": {"picker-metrics", "monitors", "sidecar-metrics", "doctor-tls"},
}


@pytest.mark.parametrize("case", CASES)
def test_what_pods_mount_is_made_or_is_said_to_exist(case: str) -> None:
    manifests = chart.render(chart.case(case))
    made = {m["metadata"]["name"] for m in manifests if m["kind"] in ("Secret", "ConfigMap")}
    given = GIVEN.get(case, set())
    assert mounted(manifests) - made == given
    for _, spec in chart.pods(manifests):
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = {m["name"] for c in chart.containers(spec) for m in c.get("volumeMounts", [])}
        assert mounts == volumes, spec


@pytest.mark.parametrize("case", CASES)
def test_pods_run_restricted(case: str) -> None:
    """The `restricted` Pod Security Standard, and more: no root file system, no subPath."""
    for name, spec in chart.pods(chart.render(chart.case(case))):
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name
        assert spec["enableServiceLinks"] is False, name
        for item in chart.containers(spec):
            own = item["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, (name, item["name"])
            assert own["capabilities"] == {"drop": ["ALL"]}, (name, item["name"])
            assert own.get("readOnlyRootFilesystem") or item["name"] in ("engine", "tokenizer")
            assert item["resources"]["requests"]["cpu"], (name, item["name"])
            assert item["resources"]["limits"]["memory"], (name, item["name"])
            assert not any("subPath" in mount for mount in item.get("volumeMounts", []))


def test_secrets_are_mounted_key_by_key() -> None:
    manifests = chart.render(chart.case("everything"))
    deployment = chart.find(manifests, "Deployment", "kv-epp")["spec"]["template"]["spec"]
    keys = next(v["secret"] for v in deployment["volumes"] if v["name"] == "keys")
    assert {item["key"] for item in keys["items"]} == {"debug-token", "routing-key", "salt-key"}
    assert "peer-key" not in str(deployment)
    engine = chart.find(manifests, "Deployment", "kv-engine")["spec"]["template"]["spec"]
    sidecar = next(c for c in engine["initContainers"])
    assert [m["name"] for m in sidecar["volumeMounts"]] == ["keys", "metrics-tls"]  # not the peer key
    keys = next(v["secret"] for v in engine["volumes"] if v["name"] == "keys")
    assert [item["key"] for item in keys["items"]] == ["routing-key"]


def test_probes_ask_what_they_mean() -> None:
    epp = chart.container(chart.minimal(), "epp")
    assert epp["livenessProbe"]["grpc"]["service"] == "liveness"  # true while it drains and while it syncs
    assert epp["startupProbe"]["grpc"]["service"] == "liveness"
    assert epp["readinessProbe"]["grpc"]["service"] == "readiness"


@pytest.mark.parametrize("native", [True, False])
def test_an_engine_ends_after_everybody_has_let_go_of_it(native: bool) -> None:
    engine = {"enabled": True, "modelName": "m", "sidecar": {"native": native}}
    spec = chart.find(chart.minimal({"engine": engine}), "Deployment", "-engine")["spec"]["template"]["spec"]
    by_name = {c["name"]: c for c in chart.containers(spec)}
    pause = int(by_name["engine"]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert 0 < pause < spec["terminationGracePeriodSeconds"]
    if native:  # the kubelet ends it after the engine
        assert by_name["sidecar"]["restartPolicy"] == "Always"
        assert [c["name"] for c in spec["initContainers"]] == ["sidecar"]
        assert "startupProbe" not in by_name["sidecar"]  # the engine would wait for it, and it for the engine
    else:
        assert by_name["sidecar"]["lifecycle"] == by_name["engine"]["lifecycle"]
        assert "restartPolicy" not in by_name["sidecar"]


def test_a_picker_drains_within_its_grace_time() -> None:
    manifests = chart.minimal({"router": {"epp": {"drainTimeoutSeconds": 300}}})
    spec = chart.find(manifests, "Deployment")["spec"]["template"]["spec"]
    assert "--drain-timeout=300s" in chart.container(manifests, "epp")["args"]
    assert spec["terminationGracePeriodSeconds"] > 300


def test_one_picker_has_neither_budget_nor_siblings() -> None:
    one = chart.minimal()
    assert "PodDisruptionBudget" not in chart.kinds(one)
    assert not any("sibling" in argument for argument in chart.container(one, "epp")["args"])
    two = chart.minimal({"router": {"epp": {"replicas": 2}}})
    assert chart.find(two, "PodDisruptionBudget")["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    siblings = chart.find(two, "Service", "-siblings")["spec"]
    assert (siblings["clusterIP"], siblings["publishNotReadyAddresses"]) == ("None", True)


def test_standbys_hold_up_neither_rollouts_nor_nodes() -> None:
    """They are never ready: a budget would wait for them, and so would a rolling update."""
    manifests = chart.render(chart.case("standby"))
    assert "PodDisruptionBudget" not in chart.kinds(manifests)
    strategy = chart.find(manifests, "Deployment", "-epp")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": "100%", "maxUnavailable": "100%"}
    active = chart.minimal({"router": {"epp": {"replicas": 3}}})
    strategy = chart.find(active, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_reference_s_flag_means_active_passive() -> None:
    flags = {"ha-enable-leader-election": True}
    manifests = chart.minimal({"router": {"epp": {"replicas": 2, "flags": flags}}})
    arguments = chart.container(manifests, "epp")["args"]
    assert "--ha-mode=active-passive" in arguments
    assert not any("leader-election" in argument for argument in arguments)
    assert "PodDisruptionBudget" not in chart.kinds(manifests)
    off = chart.minimal({"router": {"epp": {"replicas": 2, "flags": {"ha-enable-leader-election": False}}}})
    assert "--ha-mode=active-active" in chart.container(off, "epp")["args"]


def test_objectives_name_the_pool() -> None:
    manifests = chart.render(chart.case("attach"))
    found = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "InferenceObjective"}
    pool = {"group": "inference.networking.k8s.io", "name": "llama"}
    assert found == {"urgent": {"priority": 10, "poolRef": pool}, "batch": {"priority": -1, "poolRef": pool}}


def test_an_autoscaler_owns_the_number_of_pickers() -> None:
    manifests = chart.minimal({"router": {"epp": {"autoscaling": {"enabled": True}}}})
    assert "replicas" not in chart.find(manifests, "Deployment")["spec"]
    scaler = chart.find(manifests, "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == chart.find(manifests, "Deployment")["metadata"]["name"]
    assert chart.find(manifests, "Service", "-siblings")
