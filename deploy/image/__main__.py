"""Build both images, weigh them, start them: `python -m deploy.image` (as root, on Debian or Ubuntu).

Exit status 0: built and all probes passed; 1: something failed; 2: this machine cannot build (the sentence
says what is missing).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from deploy.image import bases, probes
from deploy.image.buildah import Build, Buildah, ImageError, missing_tools

ROOT = Path(__file__).resolve().parents[2]
PROBES = {"epp": probes.probe_epp, "sidecar": probes.probe_sidecar}
LOCKS = ("epp", "sidecar", "build")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.image", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "out" / "image", help="store, bases and wheels are kept here"
    )
    parser.add_argument("--target", choices=sorted(PROBES), action="append", help="absent: both")
    arguments = parser.parse_args()
    if missing := missing_tools():
        print(
            f"image: {', '.join(missing)} not installed (apt-get install {' '.join(missing)})",
            file=sys.stderr,
        )
        return 2
    if os.geteuid() != 0:
        print("image: mounts and user ids need root", file=sys.stderr)
        return 2
    try:
        make(arguments.work, arguments.target or sorted(PROBES))
    except (ImageError, probes.ProbeFailed) as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    return 0


def make(work: Path, targets: list[str]) -> None:
    """Raises ImageError, ProbeFailed."""
    buildah = Buildah(work)
    bases.make_bases(buildah, work)
    wheels = bases.make_wheelhouse(work, [ROOT / "requirements" / f"image-{name}.lock" for name in LOCKS])
    given = (
        f"BASE={bases.BASE}",
        f"BUILD_BASE={bases.BUILD_BASE}",
        "PIP_NO_INDEX=1",
        "PIP_FIND_LINKS=/wheels",
    )
    base_bytes = sum(buildah.layers(bases.BASE))
    for target in targets:
        tag = f"localhost/kvpull/{target}:local"
        buildah.build(Build(tag, ROOT, target, given, wheels))
        with buildah.mounted(tag) as root:
            seen = PROBES[target](root, buildah.configuration(tag))
            print(f"{target}: {weight(root, sum(buildah.layers(tag)), base_bytes)}")
            for sentence in (*seen, bill(root)):
                print(f"  {sentence}")


def weight(root: Path, compressed: int, base: int) -> str:
    """Ours is what lies on the base image: unpacked, and as a registry serves it."""
    files = [path.lstat().st_size for path in (root / "opt").rglob("*")]
    ours = f"{sum(files) / 1e6:.0f} MB on the base image, {(compressed - base) / 1e6:.0f} MB to download"
    return f"{ours} (with this base: {compressed / 1e6:.0f} MB)"


def bill(root: Path) -> str:
    """The SBOM says what is there."""
    found = json.loads((root / "opt" / "kvpull" / "sbom.cdx.json").read_text())["components"]
    python = sum(component["purl"].startswith("pkg:pypi/") for component in found)
    return f"SBOM: {python} Python packages, {len(found) - python} others"


if __name__ == "__main__":
    sys.exit(main())
