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
_SLIM = "python3,python3-venv,ca-certificates"
_COMPILER = "gcc,libc6-dev,python3-dev"
_DOCKERFILE = "FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin\n"


def make_bases(buildah: Buildah, folder: Path) -> None:
    """Both base images, unless they are there. Raises ImageError."""
    for tag, packages in ((BASE, _SLIM), (BUILD_BASE, f"{_SLIM},{_COMPILER}")):
        if not buildah.has(tag):
            _make(buildah, folder / "base", tag, packages)


def _make(buildah: Buildah, folder: Path, tag: str, packages: str) -> None:
    root, context = folder / "root", folder / "context"
    for old in (root, context):
        shutil.rmtree(old, ignore_errors=True)
    context.mkdir(parents=True)
    cache = folder / "packages"
    cache.mkdir(exist_ok=True)
    options = ["--variant=minbase", f"--include={packages}", f"--cache-dir={cache.absolute()}"]
    run(["debootstrap", *options, SUITE, str(root), MIRROR])
    run(
        [
            "tar",
            "-C",
            str(root),
            "--exclude=./var/cache/apt/archives/*.deb",
            "-cf",
            str(context / "base.tar"),
            ".",
        ]
    )
    (context / "Dockerfile").write_text(_DOCKERFILE)
    buildah.build(Build(tag, context))
    for done in (root, context):
        shutil.rmtree(done)


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
