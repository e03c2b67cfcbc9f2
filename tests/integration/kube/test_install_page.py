"""docs/install.md: `console` blocks are run as written, `sh` blocks are read by the real parsers.

The test plays the controllers and the kubelet that the double does not have.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.cli import parser
from epp.thresholds.document import parse_document
from tests.kube import kinds
from tests.kube.kubectl import Kubectl, tool_path
from tests.kube.notice import BOUND_S
from tests.kube.server import KubeServer

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "install.md").read_text()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DEPLOYMENTS = ("apps", "v1", "deployments")
HELM = """#!/bin/sh
# the double serves no OpenAPI v2
case $1 in install|upgrade) set -- "$@" --disable-openapi-validation ;; esac
exec {helm} "$@"
"""


def blocks(language: str, text: str = PAGE) -> list[str]:
    return [body for found, body in _BLOCK.findall(text) if found == language]


def files() -> dict[str, str]:
    """YAML blocks that begin with a file's name."""
    named = [(re.match(r"# (\S+\.yaml)\n", body), body) for body in blocks("yaml")]
    return {match[1]: body for match, body in named if match}


def console_commands() -> list[str]:
    lines = [line for body in blocks("console") for line in body.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [line.removeprefix("$ ") for line in lines]


def sh_commands() -> list[str]:
    return [line for body in blocks("sh") for line in body.splitlines()]


@asynccontextmanager
async def cluster(kube: KubeServer) -> AsyncIterator[None]:
    """Deployments become available, pods of tests succeed."""

    def work() -> bool:
        for (namespace, name), found in list(kube.store.table(DEPLOYMENTS).objects.items()):
            generation, replicas = found["metadata"]["generation"], found["spec"].get("replicas", 1)
            status: dict[str, Any] = {"observedGeneration": generation, "replicas": replicas}
            status |= dict.fromkeys(("updatedReplicas", "readyReplicas", "availableReplicas"), replicas)
            if found.get("status") != status:
                body = found | {"status": status}
                kube.store.update(DEPLOYMENTS, namespace, name, body, status_only=True)
        for (namespace, name), found in list(kube.store.table(kinds.PODS.key).objects.items()):
            if "status" not in found:
                body = found | {"status": {"phase": "Succeeded"}}
                kube.store.update(kinds.PODS.key, namespace, name, body, status_only=True)
        return False

    task = asyncio.create_task(_forever(kube, work))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _forever(kube: KubeServer, work: Any) -> None:
    while True:
        try:
            await kube.notice.until(work)
        except TimeoutError:
            continue


def lay_out(folder: Path, kubectl: Kubectl) -> dict[str, str]:
    """A working directory as the page expects it; the environment of its commands."""
    tools = folder / "bin"
    tools.mkdir()
    (folder / "deploy").symlink_to(ROOT / "deploy")
    (tools / "kubectl").symlink_to(kubectl.binary)
    (tools / "helm").write_text(HELM.format(helm=tool_path("helm")))
    (tools / "helm").chmod(0o755)
    for name, text in files().items():
        (folder / name).write_text(text)
    return kubectl.environment() | {"PATH": f"{tools}:/usr/bin:/bin"}


async def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_shell(
        command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(2 * BOUND_S):
        said, _ = await process.communicate()
    assert process.returncode == 0, (command, said.decode())
    return said.decode()


async def serve_routes(kube: KubeServer) -> None:
    """HTTPRoute, as the page's gateway needs it."""
    names = {"kind": "HTTPRoute", "plural": "httproutes", "singular": "httproute"}
    version = {"name": "v1", "served": True, "storage": True}
    spec = {
        "group": "gateway.networking.k8s.io",
        "scope": "Namespaced",
        "names": names,
        "versions": [version],
    }
    meta = {
        "name": "httproutes.gateway.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "x"},
    }
    crd = {"metadata": meta, "spec": spec}
    kube.store.create(kinds.CRDS.key, "", crd)


@pytest.mark.timeout(300)
async def test_the_guide_from_install_to_uninstall(
    kube: KubeServer, kubectl: Kubectl, tmp_path: Path
) -> None:
    await serve_routes(kube)
    folder = tmp_path / "work"
    folder.mkdir()
    environment = lay_out(folder, kubectl)
    said: list[str] = []
    async with cluster(kube):
        for command in console_commands():
            said.append(await run(command, folder, environment))
            if command == "kubectl apply -f thresholds.yaml":
                found = kube.store.get(kinds.CONFIG_MAPS.key, "llm", "kvpull-epp-thresholds")["data"]
                assert parse_document(found["pull.yaml"], "pull.yaml") is not None
            if command.startswith("helm rollback"):  # the ConfigMap is the operator's, not the release's
                found = kube.store.get(kinds.CONFIG_MAPS.key, "llm", "kvpull-epp-thresholds")["data"]
                assert "enabled: false" in found["pull.yaml"]
    together = "\n".join(said)
    assert 'deployment "kvpull-epp" successfully rolled out' in together
    assert "Rollback was a success" in together
    left = [n for table in kube.store.tables.values() for (where, n) in table.objects if where == "llm"]
    assert sorted(left) == sorted(kinds.OF_EVERY_NAMESPACE.values())


@pytest.mark.parametrize("command", sh_commands())
def test_commands_that_need_engines_are_taken_by_their_parsers(command: str, kubectl_binary: Path) -> None:
    program, *arguments = shlex.split(command)
    if program == "kvpull":
        parser().parse_args(arguments)
        return
    if program == "docker":
        target = arguments[arguments.index("--target") + 1]
        assert f" AS {target}\n" in (ROOT / "Dockerfile").read_text()
        return
    assert program == "kubectl"
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    known = _help(kubectl_binary, arguments[0])  # nothing is contacted
    assert all(flag in known for flag in flags), flags


def _help(kubectl: Path, command: str) -> str:
    texts = [[str(kubectl), command, "--help"], [str(kubectl), "options"]]
    return "".join(subprocess.run(t, capture_output=True, text=True, check=True).stdout for t in texts)


def test_names_in_the_page_are_those_of_the_chart() -> None:
    for name, text in files().items():
        document = yaml.safe_load(text)
        if document.get("kind") == "ConfigMap":
            assert document["metadata"]["name"] == "kvpull-epp-thresholds", name
            assert parse_document(document["data"]["pull.yaml"], name) is not None


def test_pages_link_to_pages_that_exist() -> None:
    for page in ("install.md", "migration.md", "security.md"):
        for target in re.findall(r"\]\(([a-z]+\.md)\)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), (page, target)
