"""Real vLLM processes for the tests of this folder, and only for them: `make test-engine`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import processes
from tests.engine.model import write_model
from tests.parity.families import FAMILIES, Family, write_family

SERVED_NAME = "m"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The engine tests take minutes and another environment: whoever has not made it skips them."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not processes.PYTHON.exists():
            item.add_marker(pytest.mark.skip(reason="no .venv-vllm here: run `make test-engine`"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory for each family: tokenizer, template, tiny random weights."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    for family in FAMILIES:
        made[family.name] = root / family.name
        _write(family, made[family.name])
    return made


def _write(family: Family, directory: Path) -> None:
    write_family(family, directory)
    write_model(directory, bos=family.bos, eos=family.eos)


@pytest.fixture(scope="session")
def renderers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Base URL of vLLM's own render server for each family."""
    ports = dict(zip(models, processes.free_ports(len(models)), strict=True))
    script = str(Path(__file__).parent / "render_servers.py")
    pairs = [f"{ports[name]}={directory}" for name, directory in models.items()]
    process = processes.Process([script, *pairs], tmp_path_factory.mktemp("render") / "log")
    try:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        process.wait_ready([f"{url}/health" for url in urls.values()])
        yield urls
    finally:
        process.stop()
