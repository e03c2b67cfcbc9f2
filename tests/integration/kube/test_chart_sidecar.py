"""The sidecar of the chart as its ServiceAccount: arguments, members of the pool, rights just enough."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from sidecar.config import parse_config
from sidecar.server import Sidecar
from tests.integration.kube.rig import add_pod
from tests.integration.kube.test_sidecar_members import SOURCE, source_port
from tests.integration.sidecar.doubles import recording_engine
from tests.integration.sidecar.rig import COMPLETIONS, PORT, own_host
from tests.kube import chart, kinds
from tests.kube.kubectl import Kubectl
from tests.kube.rbac import ADMIN
from tests.kube.server import KubeServer

VALUES = chart.merged(
    chart.MINIMAL,
    {
        "engine": {"enabled": True, "modelName": "m"},
        "router": {"modelServers": {"targetPorts": [{"number": PORT}]}},
    },
)


async def test_it_follows_members_with_exactly_the_rights_it_has(
    kube: KubeServer, helm: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("install", "kv", str(chart.CHART), "-f", "-", "--disable-openapi-validation")
    await helm.run(*command, stdin=json.dumps(VALUES))
    kube.authority.anonymous = ADMIN
    pod = kube.store.get(("apps", "v1", "deployments"), "default", "kv-engine")["spec"]["template"]["spec"]
    kube.authority.tokens["pod"] = f"system:serviceaccount:default:{pod['serviceAccountName']}"
    monkeypatch.setenv("KUBECONFIG", str(kube.write_kubeconfig(tmp_path / "config", token="pod")))
    add_pod(kube, "peer", "10.0.0.7")
    host = own_host()
    async with recording_engine(own_host()) as engine, aiohttp.ClientSession() as session:
        # without the key (this test plays no picker) members are what is followed
        unsigned = [a for a in pod["initContainers"][0]["args"] if "routing-key" not in a]
        here = ["--listen-host", host, "--model-server-host", engine.host, "--metrics-port=0"]
        config = parse_config([*unsigned, *here, f"--model-server-port={engine.port}"], {"POD_IP": host})
        async with Sidecar(config):
            await kube.until_watched("pods")
            url, headers = f"http://{host}:{PORT}{COMPLETIONS}", {SOURCE: f"10.0.0.7:{PORT}"}
            async with session.post(url, json={"prompt": "x"}, headers=headers) as answer:
                assert answer.status == 200
            assert source_port(engine) == 7777
    asked = {(s.verb, s.plural) for s in kube.requests if s.user.endswith(":kv-engine")}
    rules = kube.store.get(kinds.ROLES.key, "default", "kv-engine")["rules"]
    assert asked == {(verb, plural) for r in rules for verb in r["verbs"] for plural in r["resources"]}
