"""The chart, rendered by the real helm."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.kube.kubectl import tool_path

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "kvpull"
CASES = tuple(sorted(path.stem for path in (CHART / "ci").glob("*.yaml")))
RELEASE, NAMESPACE = "kv", "llm"
MINIMAL: dict[str, Any] = {"router": {"modelServers": {"matchLabels": {"app": "llama"}}}}

Manifest = dict[str, Any]


class ChartRefused(Exception):
    """helm would not render it; the message is what helm says."""


def merged(*values: dict[str, Any]) -> dict[str, Any]:
    """Deep; the later wins."""
    result: dict[str, Any] = {}
    for value in values:
        for key, item in value.items():
            both = isinstance(item, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], item) if both else item
    return result


def case(name: str) -> dict[str, Any]:
    """Values of a file in the chart's ci/."""
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())
    return values


def render(values: dict[str, Any]) -> list[Manifest]:
    """Manifests of the chart under these values.

    Raises:
        ChartRefused: with helm's sentence.
    """
    return [doc for doc in yaml.safe_load_all(_render(json.dumps(values, sort_keys=True))) if doc]


def minimal(values: dict[str, Any] | None = None) -> list[Manifest]:
    """The same on top of the one value that is required."""
    return render(merged(MINIMAL, values or {}))


@functools.cache
def _render(values: str) -> str:
    command = [str(tool_path("helm")), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "-f", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChartRefused(done.stderr)
    return done.stdout


def find(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    """The one of this kind whose name ends so."""
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(name)]
    assert len(found) == 1, (kind, name, [m["metadata"]["name"] for m in found])
    return found[0]


def kinds(manifests: list[Manifest]) -> set[str]:
    return {manifest["kind"] for manifest in manifests}


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and spec of every pod that would run."""
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["metadata"]["name"], manifest["spec"]
        elif manifest["kind"] in ("Deployment", "Job"):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def containers(spec: Manifest) -> list[Manifest]:
    """Init containers first."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def container(manifests: list[Manifest], name: str) -> Manifest:
    found = [c for _, spec in pods(manifests) for c in containers(spec) if c["name"] == name]
    assert len(found) == 1, name
    return found[0]
