"""Every command in README.md and docs/ is run by a test, or is in the one list here that says why not.

A command is a line of a code block (fenced, or indented) that begins with a program; `\\` joins lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from epp import cli
from tests.fleet.test_operators import documented_commands
from tests.integration.kube import test_install_page

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (
    "make",
    "kvpull",
    "kubectl",
    "helm",
    "docker",
    "pip",
    "vllm",
    "curl",
    "git",
    "checkov",
    "python",
    ".venv",
)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)

NEEDS_ENGINES = "parsed by test_install_page; needs a cluster's engines, whose part the fleet's tests play"
NEEDS_CARD = "needs a model and an accelerator; its JSON is that of tests/engine"
# page -> command as it begins -> why no test runs it as it stands
NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {
        "make demo": "what it does is tests/fleet/test_demo.py",
        "make test": "this is it",
        "make test-engine": "run by .ci/run",
    },
    "calibration.md": {
        "kvpull calibrate": "run by tests/integration/calibrate with addresses of its own",
        "kubectl apply": "run as a command of install.md",
    },
    "engine-plugin.md": {"pip install": "no registry has the package yet", "vllm serve": NEEDS_CARD},
    "install.md": {
        "kubectl port-forward": NEEDS_ENGINES,
        "kubectl get": NEEDS_ENGINES,
        "kvpull calibrate": NEEDS_ENGINES,
        "kvpull thresholds": NEEDS_ENGINES,
        "kvpull doctor": NEEDS_ENGINES,
        "kvpull explain": NEEDS_ENGINES,
        "docker build": "needs Docker; python -m deploy.image does the same with buildah, in make soak",
    },
    "plugins.md": {"kvpull config": "run by tests/unit/ops/test_show_config.py on files of its own"},
    "simulation.md": {"kvpull simulate": "run by tests/unit/simulator with a shorter trace"},
    "sizing.md": {"kvpull size": "run below, with a config.json"},
    "snapshots.md": {
        "kvpull epp": "run by tests/integration/app/test_snapshots.py with all that is left out here"
    },
    "kubernetes.md": {"make test-cluster": "run by test_choice.py there, with a cluster in another process"},
}


def commands(text: str) -> Iterator[str]:
    """As written, without a prompt and without comments."""
    blocks = [body for language, body in _FENCED.findall(text) if language in ("", "sh", "console", "bash")]
    blocks += _INDENTED.findall(_FENCED.sub("", text))
    for block in blocks:
        joined = re.sub(r"\\\n\s*", "", block)
        for line in map(str.strip, joined.splitlines()):
            line = re.sub(r"\s{2,}.*$|\s+# .*$", "", line.removeprefix("$ "))
            if line.split(" ")[0].split("/")[0] in PROGRAMS:
                yield line


RUN = {"install.md": test_install_page.console_commands(), "troubleshooting.md": documented_commands()}
FOUND = {page.name: list(commands(page.read_text())) for page in PAGES}


@pytest.mark.parametrize("page", [name for name, found in FOUND.items() if found])
def test_every_command_is_run_or_excused(page: str) -> None:
    excused = NOT_RUN.get(page, {})
    left = [line for line in FOUND[page] if line not in RUN.get(page, ())]
    assert [line for line in left if not any(line.startswith(begin) for begin in excused)] == []


def test_no_excuse_is_left_over() -> None:
    for page, excused in NOT_RUN.items():
        left = [line for line in FOUND[page] if line not in RUN.get(page, ())]
        assert [begin for begin in excused if not any(line.startswith(begin) for line in left)] == [], page


def test_commands_are_seen_in_every_form() -> None:
    """Else a page could have one that nobody looks for."""
    fenced = "```sh\nkvpull a\n```\n```console\n$ helm b\n```\n```yaml\nmake: x\n```\n"
    text = f"{fenced}\n    kvpull c \\\n      --d   # why\n\n    not one\n"
    assert list(commands(text)) == ["kvpull a", "helm b", "kvpull c --d"]
    assert len(FOUND["troubleshooting.md"]) == len(documented_commands())


KVPULL = sorted(
    {line for found in FOUND.values() for line in found if line.startswith("kvpull ") and "..." not in line}
)


@pytest.mark.parametrize("line", KVPULL)
def test_kvpull_knows_the_arguments(line: str) -> None:
    cli.parser().parse_args(shlex.split(re.sub(r"\$[A-Z_]*PORT[A-Z_]*|\$SIDECAR_METRICS", "8100", line))[1:])


def test_the_sizing_page_s_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama 3.1 8B's: the page's table says 128 KiB."""
    (line,) = FOUND["sizing.md"]
    (tmp_path / "config.json").write_text(LLAMA)
    monkeypatch.chdir(tmp_path)
    assert cli.main(tuple(shlex.split(line)[1:])) in (0, 1)
    assert "131,072" in capsys.readouterr().out


LLAMA = """{
 "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"
}"""
