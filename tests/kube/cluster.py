"""A cluster as its users know it: a kubeconfig, kubectl and helm, and a namespace of one's own.

Nothing here can tell a real cluster from the double. Which one it is, is chosen in one place
(`tests/integration/cluster/conftest.py`), and a real one only if it was named: see `chosen_kubeconfig`.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.kube.kubectl import Kubectl, tool_path
from tests.kube.notice import BOUND_S

OPT_IN = "KVPULL_TEST_CLUSTER"
# everything that a release, or a test, may leave behind
KINDS = (
    "deployments,services,serviceaccounts,configmaps,secrets,pods,jobs,poddisruptionbudgets,roles,rolebindings,"
    "horizontalpodautoscalers,networkpolicies,leases,inferencepools.inference.networking.k8s.io"
)
# made by a cluster's controllers in every namespace
_OF_THE_CLUSTER = frozenset({"ServiceAccount/default", "ConfigMap/kube-root-ca.crt"})


class NotMeant(Exception):
    """A cluster that was not named, or is another than the one named."""


def chosen_kubeconfig(environment: Mapping[str, str]) -> Path | None:
    """The kubeconfig of the real cluster to test in; None: the double.

    KUBECONFIG alone chooses nothing, since every developer has one. KVPULL_TEST_CLUSTER must be the name of
    its current context as well.

    Raises:
        NotMeant: the current context has another name.
    """
    wanted = environment.get(OPT_IN)
    if not wanted:
        return None
    path = Path(environment.get("KUBECONFIG", ""))
    if not path.is_file():
        raise NotMeant(f"{OPT_IN} is set, but KUBECONFIG is not the path of one file")
    found = (yaml.safe_load(path.read_text()) or {}).get("current-context")
    if found != wanted:
        raise NotMeant(f"{OPT_IN} is {wanted!r}, but the current context is {found!r}: nothing is touched")
    return path


@dataclass(frozen=True)
class Cluster:
    """One namespace of a cluster, as its administrator."""

    kubectl: Kubectl
    helm: Kubectl
    namespace: str
    folder: Path
    helm_flags: tuple[str, ...]

    async def apply(self, *manifests: dict[str, Any] | str, flags: tuple[str, ...] = ()) -> str:
        """`kubectl apply` of them all."""
        texts = [m if isinstance(m, str) else json.dumps(m) for m in manifests]
        return await self.kubectl.run("apply", *flags, "-f", "-", stdin="\n---\n".join(texts))

    async def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.kubectl.run("get", kind, name, "-o", "json"))
        return found

    async def secret(self, name: str) -> dict[str, bytes]:
        data = (await self.get("secret", name))["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}

    async def left(self) -> set[str]:
        """Kind/name of everything in the namespace but for what a cluster puts there itself."""
        items = json.loads(await self.kubectl.run("get", KINDS, "-o", "json"))["items"]
        return {f"{item['kind']}/{item['metadata']['name']}" for item in items} - _OF_THE_CLUSTER

    async def put_pod(self, name: str, address: str, **metadata: Any) -> None:
        """A ready pod that no node runs: it is gated, and its status is ours."""
        spec = {
            "schedulingGates": [{"name": "test.kvpull/never"}],
            "containers": [{"name": "c", "image": "none"}],
        }
        meta = {"name": name, "labels": {"app": "llama"}} | metadata
        await self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
        patch = json.dumps({"status": status})
        await self.kubectl.run("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)

    async def account_kubeconfig(self, account: str) -> Path:
        """What a pod under this ServiceAccount may do."""
        token = (await self.kubectl.run("create", "token", account)).strip()
        config = json.loads(await self.kubectl.run("config", "view", "--raw", "-o", "json"))
        config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
        path = self.folder / f"{account}-kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def as_account(self, kubeconfig: Path) -> Kubectl:
        return Kubectl(self.kubectl.binary, kubeconfig)


@asynccontextmanager
async def own_namespace(kubeconfig: Path, folder: Path) -> AsyncIterator[Cluster]:
    """A new namespace, deleted at the end. The kubeconfig is copied, never written."""
    binary = tool_path("kubectl")
    home = folder / "cluster"
    home.mkdir()
    command = ("config", "view", "--raw", "--minify", "--flatten", "-o", "json")
    config = json.loads(await Kubectl(binary, kubeconfig).run(*command))
    namespace = f"kvpull-test-{uuid.uuid4().hex[:8]}"
    config["contexts"][0]["context"]["namespace"] = namespace
    copied = home / "config"
    copied.write_text(json.dumps(config))
    kubectl = Kubectl(binary, copied)
    await kubectl.run("create", "namespace", namespace)
    try:
        # a controller makes it, and no pod is accepted before
        await kubectl.run("wait", "--for=create", "serviceaccount/default", f"--timeout={int(BOUND_S)}s")
        # helm checks manifests with OpenAPI v2 where the server has it
        flags = () if await _serves_v2(kubectl) else ("--disable-openapi-validation",)
        yield Cluster(kubectl, Kubectl(tool_path("helm"), copied), namespace, home, flags)
    finally:
        for pod in (await kubectl.run("get", "pods", "-o", "name")).split():  # what a failed test holds
            await kubectl.run("patch", pod, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        await kubectl.run("delete", "namespace", namespace, "--wait=false")


async def _serves_v2(kubectl: Kubectl) -> bool:
    process = await kubectl.start("get", "--raw", "/openapi/v2")
    await process.communicate()
    return process.returncode == 0
