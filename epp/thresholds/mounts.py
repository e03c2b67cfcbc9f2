"""Mounts that can never change: a ConfigMap mounted with subPath.

A kubelet updates a ConfigMap volume by swapping its `..data` link. A subPath mount bypasses that link: the
container keeps the content it started with, for ever and in silence. Here that is found in the kernel's
own list of mounts (proc(5), mountinfo) and said. Pure but for `read_mounts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

MOUNTINFO: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_KUBELET: Final = ("/kubernetes.io~configmap/", "/kubernetes.io~projected/", "/kubernetes.io~secret/")
_ADVICE: Final = "it would never see a change; mount the whole volume at a directory, without subPath"


def read_mounts(path: Path = MOUNTINFO) -> dict[str, str]:
    """Mount point -> root of the mount in its file system; empty where the kernel does not tell."""
    try:
        return parse_mountinfo(path.read_text("utf-8", "surrogateescape"))
    except OSError:
        return {}


def parse_mountinfo(text: str) -> dict[str, str]:
    """As `read_mounts`, from the file's text. Of two mounts on one point the later one is seen."""
    mounts: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) > 5:
            root, point = (_OCTAL.sub(lambda m: chr(int(m[1], 8)), field) for field in fields[3:5])
            mounts[point] = root
    return mounts


def frozen_mount(volume: Path, files: Iterable[Path], mounts: Mapping[str, str]) -> str | None:
    """Why documents in `volume` (resolved) can never change, or None. `files`: documents in it, with
    their names in the volume and not where links lead."""
    for file in files:
        if str(file) in mounts:
            return f"{file} is a mount of its own (subPath): {_ADVICE}"
    root = mounts.get(str(volume))
    if root is None:
        return None
    inside = f"{root}/"
    if "/volume-subpaths/" in inside or "/.." in inside:
        return f"{volume} is mounted from inside a volume (subPath): {_ADVICE}"
    if any(marker in inside for marker in _KUBELET) and not (volume / "..data").is_symlink():
        return f"{volume} is part of a kubelet volume but has no ..data link (subPath): {_ADVICE}"
    return None
