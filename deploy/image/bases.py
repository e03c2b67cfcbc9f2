"""Local stand-ins for the base images, since no registry is asked: Debian by debootstrap, and a wheelhouse.

They have what `python:3.11-slim-bookworm` (and, with a compiler, `python:3.11-bookworm`) has for our
purposes: the same Debian and the same Python's first two numbers. Made once and kept.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from deploy.image.buildah import Build, Buildah, run

SUITE = "bookworm"
PYTHON = "3.11"  # that of the suite, and of the Dockerfile
MIRROR = "http://deb.debian.org/debian"
BASE = f"localhost/kvpull-base:{SUITE}"
BUILD_BASE = f"localhost/kvpull-build-base:{SUITE}"
_PACKAGES = "python3,python3-venv,ca-certificates"
_DOCKERFILE = "FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin\n"
_BUILD_DOCKERFILE = f"""FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev
"""


def make_bases(buildah: Buildah, folder: Path) -> None:
    """Both base images, unless they are there. Raises ImageError."""
    if not buildah.has(BASE):
        _debootstrap(folder / "root")
        _build(buildah, folder / "context", BASE, _DOCKERFILE, folder / "root")
        shutil.rmtree(folder / "root")
    if not buildah.has(BUILD_BASE):
        _build(buildah, folder / "context", BUILD_BASE, _BUILD_DOCKERFILE)


def _debootstrap(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    run(["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", SUITE, str(root), MIRROR])
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()


def _build(buildah: Buildah, context: Path, tag: str, dockerfile: str, root: Path | None = None) -> None:
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    if root is not None:
        run(["tar", "-C", str(root), "-cf", str(context / "base.tar"), "."])
    (context / "Dockerfile").write_text(dockerfile)
    buildah.build(Build(tag, context))
    shutil.rmtree(context)


def make_wheelhouse(folder: Path, locks: list[Path]) -> Path:
    """Every wheel of the lock files, checked by hash: the steps of the build have no network of their own.

    Raises:
        ImageError: pip could not get one.
    """
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--only-binary", ":all:", "--python-version", PYTHON, "--no-deps", "--require-hashes"]
    for lock in locks:
        run([*pip, "--dest", str(wheels), "--requirement", str(lock)])
    return wheels.absolute()
