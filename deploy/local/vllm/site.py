"""The plugin as vLLM finds it: a directory on its path that looks like an installed `kvpull`.

The package is the source tree behind a link, with the entry points that `pyproject.toml` declares; so an
engine loads it by configuration alone, as from a wheel, and always runs what is in the tree.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from deploy.local.spec import ROOT


def make_site(root: Path) -> Path:
    """Make `root/site` and return it; it belongs into an engine's PYTHONPATH."""
    site = root / "site"
    about = site / "kvpull-0.1.0.dist-info"
    about.mkdir(parents=True)
    (site / "engine_plugin").symlink_to(ROOT / "engine_plugin")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpull\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site
