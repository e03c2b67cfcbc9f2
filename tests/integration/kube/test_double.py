"""The double refuses what a real API server was seen to refuse (docs/kubernetes.md)."""

from __future__ import annotations

import pytest

from tests.integration.kube.rig import add_pod
from tests.kube import kinds
from tests.kube.kubectl import Kubectl
from tests.kube.server import KubeServer
from tests.kube.status import ApiFault

CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.GROUP}
spec:
  group: GROUP
  scope: Namespaced
  names: {kind: Thing, plural: things, singular: thing}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
"""


async def test_a_kind_in_a_protected_group_needs_an_approval(kubectl: Kubectl) -> None:
    told = await kubectl.run("apply", "-f", "-", stdin=CRD.replace("GROUP", "test.k8s.io"), code=1)
    assert 'protected groups must have approval annotation "api-approved.kubernetes.io"' in told
    for group in ("test.x-k8s.io", "example.com"):
        assert "created" in await kubectl.run("apply", "-f", "-", stdin=CRD.replace("GROUP", group))


async def test_a_namespace_gets_what_controllers_make(kube: KubeServer, kubectl: Kubectl) -> None:
    await kubectl.run("create", "namespace", "fresh")
    for key, name in kinds.OF_EVERY_NAMESPACE.items():
        assert kube.store.get(key, "fresh", name)["metadata"]["namespace"] == "fresh"


async def test_a_watch_from_before_the_start_is_expired(kube: KubeServer, kubectl: Kubectl) -> None:
    add_pod(kube, "a")
    path = "/api/v1/namespaces/default/pods?watch=1&resourceVersion=1&timeoutSeconds=1"
    assert '"code":410' in await kubectl.run("get", "--raw", path)


async def test_a_token_ends_with_its_account(kube: KubeServer) -> None:
    """Another account under the same name is another one."""
    key, account = kinds.SERVICE_ACCOUNTS.key, {"metadata": {"name": "epp"}}
    kube.store.create(key, "default", account)
    token = kube.authority.issue("default", "epp")
    assert kube.authority.user(f"Bearer {token}") == "system:serviceaccount:default:epp"
    kube.store.delete(key, "default", "epp", now=True)
    with pytest.raises(ApiFault, match="Unauthorized"):
        kube.authority.user(f"Bearer {token}")
    kube.store.create(key, "default", account)
    with pytest.raises(ApiFault, match="Unauthorized"):
        kube.authority.user(f"Bearer {token}")
