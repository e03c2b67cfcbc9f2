"""The image's build counts the compiled parts in the wheel: a part that is added has to be counted, too."""

from __future__ import annotations

import re

from deploy.local.spec import ROOT


def test_the_build_of_the_image_wants_every_compiled_part() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (wanted,) = re.findall(r'x\.endswith\("\.so"\) for x in n\) == (\d+)', dockerfile)
    sources = [*(ROOT / "epp").rglob("_compiled_*.pyx"), *(ROOT / "simulator").rglob("_compiled_*.pyx")]
    assert int(wanted) == len(sources)
