"""The double carries a release through its life with the real helm."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.cluster.test_kubectl import POOL
from tests.kube import kinds
from tests.kube.kubectl import Kubectl
from tests.kube.server import KubeServer

CHART = "apiVersion: v2\nname: little\nversion: 0.1.0\n"
CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-settings}
data: {size: {{ .Values.size | quote }}}
"""
FLAGS = ("--disable-openapi-validation",)


def write_chart(folder: Path) -> str:
    chart = folder / "little"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text(CHART)
    (chart / "values.yaml").write_text("size: 1\n")
    (chart / "templates" / "settings.yaml").write_text(CONFIG_MAP)
    (chart / "templates" / "pool.yaml").write_text(POOL)
    return str(chart)


def size(kube: KubeServer) -> str:
    data: dict[str, str] = kube.store.get(kinds.CONFIG_MAPS.key, "default", "one-settings")["data"]
    return data["size"]


async def test_a_release_from_install_to_uninstall(kube: KubeServer, helm: Kubectl, tmp_path: Path) -> None:
    chart = write_chart(tmp_path)
    await helm.run("install", "one", chart, *FLAGS)
    assert size(kube) == "1"
    assert kube.store.get(kinds.INFERENCE_POOLS, "default", "llama")["spec"]["targetPorts"][1] == {
        "number": 8001
    }
    await helm.run("upgrade", "one", chart, "--set", "size=2", *FLAGS)
    assert size(kube) == "2"
    await helm.run("rollback", "one", "1")
    assert size(kube) == "1"
    history = json.loads(await helm.run("history", "one", "-o", "json"))
    assert [(entry["revision"], entry["status"]) for entry in history][-1] == (3, "deployed")
    await helm.run("uninstall", "one")
    assert ("default", "one-settings") not in kube.store.table(kinds.CONFIG_MAPS.key).objects
    assert kube.store.table(kinds.INFERENCE_POOLS).objects == {}
    assert kube.store.table(("", "v1", "secrets")).objects == {}
