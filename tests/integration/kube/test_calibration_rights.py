"""`kvpull calibrate --apply` in a pod: no kubectl, the ServiceAccount of the Job, just enough rights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from epp.ops import calibrate
from tests.kube import chart, kinds
from tests.kube.kubectl import Kubectl
from tests.kube.rbac import ADMIN
from tests.kube.server import KubeServer

NAME = "kv-epp-thresholds"
CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {{name: {name}, namespace: default}}
data: {{thresholds.yaml: "delta {delta}"}}
"""


def config_map(delta: int, name: str = NAME) -> str:
    return CONFIG_MAP.format(name=name, delta=delta)


@pytest.fixture
async def job(kube: KubeServer, helm: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the Job: its account, and no kubectl in the image."""
    values = chart.merged(chart.case("standby"), {"router": {"objectivesGroup": "llm-d.ai"}})
    command = ("install", "kv", str(chart.CHART), "-f", "-", "--disable-openapi-validation")
    await helm.run(*command, stdin=json.dumps(values))
    pod = kube.store.get(("batch", "v1", "jobs"), "default", "kv-calibrate-1")["spec"]["template"]["spec"]
    kube.authority.anonymous = ADMIN
    kube.authority.tokens["pod"] = f"system:serviceaccount:default:{pod['serviceAccountName']}"
    monkeypatch.setenv("KUBECONFIG", str(kube.write_kubeconfig(tmp_path / "config", token="pod")))
    monkeypatch.setenv("PATH", str(tmp_path))


async def apply(text: str) -> int:
    return await asyncio.to_thread(calibrate._apply, text)


async def test_it_creates_the_config_map_and_changes_only_its_own_key(
    job: None, kube: KubeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await apply(config_map(1)) == 0
    found = kube.store.get(kinds.CONFIG_MAPS.key, "default", NAME)
    assert found["data"] == {"thresholds.yaml": "delta 1"}
    more = found["data"] | {"team.yaml": "of others"}
    kube.store.update(kinds.CONFIG_MAPS.key, "default", NAME, found | {"data": more})
    assert await apply(config_map(2)) == 0
    data = kube.store.get(kinds.CONFIG_MAPS.key, "default", NAME)["data"]
    assert data == {"thresholds.yaml": "delta 2", "team.yaml": "of others"}
    assert f"ConfigMap {NAME} changed" in capsys.readouterr().err
    rules = kube.store.get(kinds.ROLES.key, "default", "kv-calibrate")["rules"]
    asked = {seen.verb for seen in kube.requests if seen.user.endswith(":kv-calibrate")}
    assert asked == {verb for rule in rules for verb in rule["verbs"]} == {"get", "create", "update"}


async def test_another_config_map_is_out_of_its_reach(
    job: None, kube: KubeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    existing = {"metadata": {"name": "other"}, "data": {"a": "b"}}
    kube.store.create(kinds.CONFIG_MAPS.key, "default", existing)
    assert await apply(config_map(1, "other")) == 3
    told = capsys.readouterr().err
    assert "ServiceAccount default/kv-calibrate may not get configmaps in namespace default" in told
    assert kube.store.get(kinds.CONFIG_MAPS.key, "default", "other")["data"] == {"a": "b"}
