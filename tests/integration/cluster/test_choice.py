"""A real cluster is only touched if it was named, and then the same tests run there.

For "there" the double is a process of its own, of which the tests know no more than a kubeconfig.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kube.cluster import OPT_IN, NotMeant, chosen_kubeconfig

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
# everything here but this file
SUITE = sorted(str(path) for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
BOUND_S = 600


@dataclass
class Elsewhere:
    """A cluster in another process; `told` is filled in at its end."""

    kubeconfig: Path
    told: dict[str, Any] = field(default_factory=dict)

    async def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """pytest with this KUBECONFIG."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments),
            cwd=ROOT,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)} | environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(BOUND_S):
            said, _ = await process.communicate()
        return process.returncode or 0, said.decode()


@asynccontextmanager
async def elsewhere(folder: Path) -> AsyncIterator[Elsewhere]:
    cluster = Elsewhere(folder / "kubeconfig")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kube", str(cluster.kubeconfig)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert json.loads(await process.stdout.readline()) == {"ready": True}
        yield cluster
        process.terminate()
        async with asyncio.timeout(60):
            cluster.told.update(json.loads(await process.stdout.readline()))
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.skipif(bool(os.environ.get(OPT_IN)), reason="these tests choose for themselves")
class TestAsIfReal:
    @pytest.mark.timeout(700)
    async def test_the_suite_passes_there_and_leaves_nothing(self, tmp_path: Path) -> None:
        async with elsewhere(tmp_path) as cluster:
            before = cluster.kubeconfig.read_bytes()
            status, said = await cluster.run(*SUITE, **{OPT_IN: "x"})
            assert status == 0, said[-3000:]
            assert cluster.kubeconfig.read_bytes() == before
        assert cluster.told["namespaces"] == ["default", "kube-system"]
        assert cluster.told["requests"] > 200  # it was that one

    @pytest.mark.timeout(400)
    async def test_a_kubeconfig_alone_is_not_touched(self, tmp_path: Path) -> None:
        """Nor one whose context is another than the one named."""
        one = f"{HERE / 'test_kubectl.py'}::test_labels_select_and_deletion_is_seen"
        async with elsewhere(tmp_path) as cluster:
            status, said = await cluster.run(one, **{OPT_IN: ""})
            assert status == 0, said[-3000:]
            status, said = await cluster.run(one, **{OPT_IN: "production"})
            assert status == 1
            assert "is 'production', but the current context is 'x': nothing is touched" in said
        assert cluster.told["requests"] == 0


def test_a_cluster_is_named_by_its_context(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("current-context: kind-dev\n")
    assert chosen_kubeconfig({"KUBECONFIG": str(path)}) is None
    assert chosen_kubeconfig({"KUBECONFIG": str(path), OPT_IN: "kind-dev"}) == path
    for environment in ({"KUBECONFIG": str(path), OPT_IN: "yes"}, {OPT_IN: "kind-dev"}):
        with pytest.raises(NotMeant):
            chosen_kubeconfig(environment)
