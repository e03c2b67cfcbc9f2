"""Every command in README.md and docs/ is run by a test, or is in the one list here that says why not.

A command is a line of a code block (fenced, or indented) that begins with a program; `\\` joins lines.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from epp import cli
from tests.fleet import test_calibrate
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

NEEDS_CARD = "needs a model and an accelerator; its JSON is that of tests/engine"
# page -> command as it begins -> why no test runs it as it stands
NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {
        "make demo": "what it does is tests/fleet/test_demo.py",
        "make test": "this is it",
        "make test-engine": "run by .ci/run",
    },
    "engine-plugin.md": {"pip install": "no registry has the package yet", "vllm serve": NEEDS_CARD},
    "install.md": {
        "docker build": "needs Docker; python -m deploy.image does the same with buildah, in make soak",
    },
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


FOUND = {page.name: list(commands(page.read_text())) for page in PAGES}
HERE = ("plugins.md", "simulation.md", "sizing.md")  # whose commands are run at the end of this file
# page -> its commands that a test runs. Of install.md `kubectl port-forward` is played by a relay: it is
# kubectl's and the cluster's
RUN = {
    "calibration.md": test_calibrate.calibration_commands(),
    "install.md": [*test_install_page.console_commands(), *test_calibrate.guide_commands()],
    "troubleshooting.md": documented_commands(),
} | {page: FOUND[page] for page in HERE}


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
    (line,) = RUN["sizing.md"]
    (tmp_path / "config.json").write_text(LLAMA)
    monkeypatch.chdir(tmp_path)
    assert cli.main(tuple(shlex.split(line)[1:])) in (0, 1)
    assert "131,072" in capsys.readouterr().out


def test_the_plugin_page_s_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page's first example."""
    example = re.findall(
        r"^```yaml\n(apiVersion.*?)^```", (ROOT / "docs" / "plugins.md").read_text(), re.M | re.S
    )
    (tmp_path / "FILE").write_text(example[0])
    monkeypatch.chdir(tmp_path)
    check, explain = (line.replace("FILE...", "FILE") for line in RUN["plugins.md"])
    assert cli.main(tuple(shlex.split(check)[1:])) == 0
    assert "FILE" in capsys.readouterr().out
    assert cli.main(tuple(shlex.split(explain)[1:])) == 0
    assert "profile" in capsys.readouterr().out


def test_the_simulation_page_s_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed, and two prompts of a block that come again."""
    (line,) = RUN["simulation.md"]
    rows = (
        {"timestamp": 500 * n, "input_length": 512, "output_length": 2, "hash_ids": [n % 2]} for n in range(8)
    )
    (tmp_path / "your.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "your.yaml").write_text((ROOT / "config" / "epp" / "demo.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    assert cli.main((*shlex.split(line)[1:], "--seeds", "1")) == 0
    report = json.loads((tmp_path / "out" / "simulate" / "report.json").read_text())
    hits = [arm["figures"]["device_hit_share"]["mean"] for arm in report["arms"].values()]
    assert hits, report.keys()
    assert all(0.5 < hit < 1.0 for hit in hits), "of eight prompts six are known"


LLAMA = """{
 "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"
}"""
