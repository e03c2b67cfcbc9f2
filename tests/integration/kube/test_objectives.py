"""Objectives and rewrites as the real kubectl applies them; kinds that are missing or may not be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from epp.objectives.watch import ObjectiveWatch
from tests.integration.kube.rig import FAST, NAMESPACE, open_access
from tests.kube.kubectl import Kubectl
from tests.kube.notice import BOUND_S, Notice
from tests.kube.server import KubeServer

OBJECTS = """
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {priority: -5, poolRef: {name: llama}}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: other}
spec: {priority: 9, poolRef: {name: another-pool}}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: canary}
spec:
  poolRef: {name: llama}
  rules:
  - matches: [{model: {type: Exact, value: chat}}]
    targets: [{modelRewrite: llama-8b}]
"""


@asynccontextmanager
async def watching(
    kube: KubeServer, folder: Path, *, token: str = ""
) -> AsyncIterator[tuple[ObjectiveWatch, Notice]]:
    notice = Notice()
    async with open_access(kube, folder, token=token) as access:
        watch = ObjectiveWatch(access, NAMESPACE, "llama", rules=FAST, on_change=notice.tell)
        task = asyncio.create_task(watch.run())
        try:
            yield watch, notice
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def target(watch: ObjectiveWatch) -> str | None:
    rewrite = watch.rewrites.choose("chat", "r")
    return None if rewrite is None else rewrite.model


async def test_objects_come_change_and_go(kube: KubeServer, kubectl: Kubectl, tmp_path: Path) -> None:
    async with watching(kube, tmp_path) as (watch, notice):
        await kubectl.run("apply", "-f", "-", stdin=OBJECTS)
        await notice.until(lambda: watch.priority("batch") == -5 and target(watch) == "llama-8b")
        assert watch.priority("other") == 0, "another pool's"
        assert watch.priority("nobody's") == 0
        await kubectl.run("apply", "-f", "-", stdin=OBJECTS.replace("llama-8b", "llama-70b"))
        await notice.until(lambda: target(watch) == "llama-70b")
        await kubectl.run("delete", "inferencemodelrewrite", "canary")
        await notice.until(lambda: target(watch) is None)


async def test_a_kind_that_is_not_installed_is_empty(
    kube: KubeServer, kubectl: Kubectl, tmp_path: Path
) -> None:
    await kubectl.run("delete", "crd", "inferencemodelrewrites.llm-d.ai")
    async with watching(kube, tmp_path) as (watch, notice):
        await kubectl.run("apply", "-f", "-", stdin=OBJECTS.split("---")[0])
        await notice.until(lambda: watch.priority("batch") == -5)
        async with asyncio.timeout(BOUND_S):
            while watch.statuses[1].error is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert "is its CRD installed" in (watch.statuses[1].error or "")
        assert target(watch) is None


async def test_without_the_right_to_read_them_they_are_empty(kube: KubeServer, tmp_path: Path) -> None:
    kube.authority.tokens["t"] = "system:serviceaccount:default:nobody"
    async with watching(kube, tmp_path, token="t") as (watch, _):
        async with asyncio.timeout(BOUND_S):
            while watch.statuses[0].error is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert "ServiceAccount default/nobody may not list" in (watch.statuses[0].error or "")
        assert watch.priority("batch") == 0
