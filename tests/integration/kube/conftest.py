"""The API server double, and the real kubectl pointed at it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kube.kubectl import Kubectl, tool_path
from tests.kube.server import KubeServer, kube_server


@pytest.fixture
async def kube() -> AsyncIterator[KubeServer]:
    async with kube_server() as server:
        yield server


@pytest.fixture(scope="session")
def kubectl_binary() -> Path:
    return tool_path("kubectl")


@pytest.fixture
def kubectl(kube: KubeServer, kubectl_binary: Path, tmp_path: Path) -> Kubectl:
    home = tmp_path / "kubectl"
    home.mkdir()
    return Kubectl(kubectl_binary, kube.write_kubeconfig(home / "config"))


@pytest.fixture
def helm(kubectl: Kubectl) -> Kubectl:
    return Kubectl(tool_path("helm"), kubectl.kubeconfig)
