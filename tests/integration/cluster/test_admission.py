"""What the chart renders is taken by the server's own validation and admission, in a namespace that enforces
the `restricted` Pod Security Standard. Nothing is made: dry runs. The double validates custom resources only.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.kube import chart
from tests.kube.cluster import Cluster

STANDARD = "pod-security.kubernetes.io"
# of those that the chart can render, the groups that the suite asks of a cluster
SERVED = ("apps", "autoscaling", "batch", "policy", "networking.k8s.io", "rbac.authorization.k8s.io", "v1")
POOLS = "inference.networking.k8s.io"


def served(manifest: dict[str, Any]) -> bool:
    group = manifest["apiVersion"].partition("/")[0]
    return group in SERVED or (group == POOLS and manifest["kind"] == "InferencePool")


async def dry_run(cluster: Cluster, manifests: list[dict[str, Any]], code: int = 0) -> str:
    text = "\n---\n".join(json.dumps(manifest) for manifest in manifests)
    arguments = ("apply", "--dry-run=server", "--warnings-as-errors", "-f", "-")
    return await cluster.kubectl.run(*arguments, stdin=text, code=code)


async def restrict(cluster: Cluster) -> None:
    labels = [f"{STANDARD}/{mode}=restricted" for mode in ("enforce", "warn")]
    await cluster.kubectl.run("label", "namespace", cluster.namespace, *labels)


@pytest.mark.parametrize("case", chart.CASES)
async def test_the_server_takes_every_manifest(cluster: Cluster, case: str) -> None:
    await restrict(cluster)
    values = json.dumps(chart.case(case))
    rendered = await cluster.helm.run("template", "kv", str(chart.CHART), "-f", "-", stdin=values)
    manifests = [m for m in yaml.safe_load_all(rendered) if m and served(m)]
    said = await dry_run(cluster, manifests)
    assert said.count("(server dry run)") == len(manifests) >= 9


async def test_the_server_would_have_refused_others(cluster: Cluster) -> None:
    """The negative control: a pod without its security context, and a port that is none."""
    if cluster.helm_flags:
        pytest.skip("the double has no admission and validates no built-in kind")
    await restrict(cluster)
    manifests = chart.minimal()
    deployment = chart.find(manifests, "Deployment", "-epp")
    deployment["metadata"].pop("namespace")
    del deployment["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert "would violate PodSecurity" in await dry_run(cluster, [deployment], code=1)
    service = chart.find(manifests, "Service", "-epp")
    service["metadata"].pop("namespace")
    service["spec"]["ports"][0]["port"] = 70000
    assert "must be between 1 and 65535" in await dry_run(cluster, [service], code=1)
