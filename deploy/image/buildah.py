"""buildah with a store of its own, so that nothing of the machine's other images is touched.

Isolation is chroot: steps, user, files and entry point of a build are the real ones, its network and
resource limits are not. How the result runs is `deploy.image.container`'s business.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = ("buildah", "debootstrap", "crun")
_STEP_TIMEOUT_S = 1800


class ImageError(Exception):
    """A step that failed; the message has the end of what the tool said."""


def missing_tools() -> list[str]:
    """Programs that building here needs and that are not installed."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def run(command: Sequence[str], *, log: Path | None = None) -> str:
    """Standard output of a tool; all that it says goes to `log` too.

    Raises:
        ImageError: it ended with another status than 0, or not within half an hour.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(f"{command[0]}: {error}") from error
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode:
        told = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ImageError(f"{' '.join(command[:3])} ended with {done.returncode}:\n{told}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Build:
    """One `buildah bud`."""

    tag: str
    context: Path
    target: str = ""
    arguments: tuple[str, ...] = ()  # NAME=value
    wheels: Path | None = None  # seen as /wheels by the steps


class Buildah:
    """Images below one directory. Every call names store and driver: otherwise images are not found again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "buildah.log"
        folder.mkdir(parents=True, exist_ok=True)

    def _run(self, *arguments: str) -> str:
        places = ("--root", str(self._folder / "store"), "--runroot", str(self._folder / "run"))
        return run(["buildah", *places, "--storage-driver", "overlay", *arguments], log=self._log)

    def has(self, tag: str) -> bool:
        return bool(self._run("images", "--quiet", "--filter", f"reference={tag}").strip())

    def build(self, build: Build) -> None:
        """Raises ImageError."""
        options = ["--isolation", "chroot", "--pull-never", "--layers", "--tag", build.tag]
        for argument in build.arguments:
            options += ["--build-arg", argument]
        if build.target:
            options += ["--target", build.target]
        if build.wheels is not None:
            options += ["--volume", f"{build.wheels}:/wheels:ro"]
        self._run("bud", *options, str(build.context))

    def layers(self, tag: str) -> list[int]:
        """Bytes of each layer as a registry would serve it (gzip)."""
        folder = self._folder / "oci"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            self._run("push", "--quiet", tag, f"oci:{folder}:x")
            manifest = _blob(folder, json.loads((folder / "index.json").read_text())["manifests"][0])
            return [int(layer["size"]) for layer in manifest["layers"]]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def configuration(self, tag: str) -> dict[str, Any]:
        """User, Env, Entrypoint and Cmd, as OCI names them."""
        told = json.loads(self._run("inspect", "--type", "image", tag))
        found: dict[str, Any] = told["OCIv1"]["config"]
        return found

    @contextmanager
    def mounted(self, tag: str) -> Iterator[Path]:
        """The image's file system for as long as the block. What is written there is lost."""
        container = self._run("from", "--pull-never", tag).strip()
        try:
            yield Path(self._run("mount", container).strip())
        finally:
            self._run("rm", container)


def _blob(folder: Path, descriptor: dict[str, Any]) -> Any:
    algorithm, _, digest = descriptor["digest"].partition(":")
    return json.loads((folder / "blobs" / algorithm / digest).read_text())
