"""The bill of materials of an image, as CycloneDX 1.6: Python's packages and Debian's.

Runs inside the image's own build, with its Python and nothing else: standard library only. It says what is
installed where it runs, not what a lock file asked for. The same content gives the same text.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG_STATUS = Path("/var/lib/dpkg/status")
_FIELD = re.compile(r"^(Package|Version|Architecture|Status): (.*)$", re.MULTILINE)


def python_components() -> Iterator[dict[str, Any]]:
    """The interpreter and every distribution that it finds."""
    version = platform.python_version()
    yield _component("python", version, f"pkg:generic/python@{version}", "PSF-2.0")
    for found in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        licence = ", ".join(found.metadata.get_all("License-Expression", []))
        yield _component(name, found.version, f"pkg:pypi/{name}@{quote(found.version)}", licence)


def debian_components(status: str) -> Iterator[dict[str, Any]]:
    """Installed packages of a dpkg status file."""
    for paragraph in status.split("\n\n"):
        fields = dict(_FIELD.findall(paragraph))
        if fields.get("Status", "").endswith(" installed"):
            name, version, machine = fields["Package"], fields["Version"], fields["Architecture"]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={machine}"
            yield _component(name, version, purl)


def _component(name: str, version: str, purl: str, licence: str = "") -> dict[str, Any]:
    found = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return found | ({"licenses": [{"expression": licence}]} if licence else {})


def document(name: str, version: str, components: list[dict[str, Any]]) -> str:
    """The bill's text, of the image with this name and version."""
    unique = {component["purl"]: component for component in components}
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "version": version}},
        "components": [unique[purl] for purl in sorted(unique)],
    }
    return json.dumps(bill, indent=1) + "\n"


def main() -> None:
    """Write the bill of what is installed here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of the image")
    parser.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args()
    debian = DPKG_STATUS.read_text() if DPKG_STATUS.exists() else ""
    components = [*python_components(), *debian_components(debian)]
    version = importlib.metadata.version("kvpull")
    arguments.output.write_text(document(arguments.name, version, components))


if __name__ == "__main__":
    main()
