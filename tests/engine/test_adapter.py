"""The adapter against vLLM's real classes, without an engine: 0.32 as installed, and 0.33's own sources.

vLLM 0.33 has no CPU build, so it cannot serve here; its offloading classes need none.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.local.spec import ROOT
from tests.engine import processes
from tests.engine.pull_engines import environment

NEXT_CLASSES = processes.PYTHON.parents[1] / "classes-0.33"
CASES = 21


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_every_case_of_the_adapter(version: str, tmp_path: Path) -> None:
    path = [str(ROOT)]
    if version == "0.33":
        if not NEXT_CLASSES.exists():
            pytest.skip("the sources of vLLM 0.33 could not be fetched by requirements/vllm-setup.sh")
        path.insert(0, str(NEXT_CLASSES))
    done = subprocess.run(
        [str(processes.PYTHON), "-m", "tests.engine.inside.adapter"],
        env=os.environ | environment(Path(os.pathsep.join(path))),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    passed = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(passed) == CASES, done.stdout


@pytest.mark.timeout(300)
def test_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    ask = (
        "import vllm.version\nvllm.version.__version__ = '0.31.2'\n"
        "from engine_plugin.register import register\nregister()"
    )
    done = subprocess.run(
        [str(processes.PYTHON), "-c", ask],
        env=os.environ | environment(ROOT),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode != 0
    assert "kvpull supports vLLM 0.32 and 0.33, not 0.31.2" in done.stderr
