"""Real vLLM processes for the tests of this folder, and only for them: `make test-engine`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from deploy.local.vllm.site import make_site
from epp.request.tokenise import LocalTokeniser
from tests.engine import processes
from tests.engine.item_model import write_item_model
from tests.engine.model import write_adapter, write_model
from tests.engine.pull_engines import BLOCK_BYTES, KEY, PullEngine, start_engines, until
from tests.engine.reports import Reports
from tests.engine.serving import Engine, connect, lora_flags, serve_arguments
from tests.parity.families import FAMILIES, Family, write_family
from tests.parity.ours import open_router_tokeniser
from tests.ports import free_ports

SERVED_FAMILY = "llama3"


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


@contextlib.contextmanager
def render_servers(served: Mapping[str, tuple[Path, Sequence[str]]], log: Path) -> Iterator[dict[str, str]]:
    """vLLM's own render servers by name, each with its model directory and flags; yields base URLs."""
    ports = dict(zip(served, free_ports(len(served)), strict=True))
    script = str(Path(__file__).parent / "render_servers.py")
    words = [f"{ports[name]}={path}={json.dumps(list(flags))}" for name, (path, flags) in served.items()]
    process = processes.Process([script, *words], log)
    try:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        process.wait_ready([f"{url}/health" for url in urls.values()])
        yield urls
    finally:
        process.stop(politely=False)  # several servers in one process: only one of them would hear


@pytest.fixture(scope="session")
def renderers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Base URL of a render server for each family."""
    served = {name: (directory, ()) for name, directory in models.items()}
    with render_servers(served, tmp_path_factory.mktemp("render") / "log") as urls:
        yield urls


@pytest.fixture(scope="session")
def engine(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A serving vLLM with KV events, replay and one LoRA adapter."""
    work = tmp_path_factory.mktemp("engine")
    write_adapter(work / "adapter")
    (port,) = free_ports(1)
    arguments = serve_arguments(models[SERVED_FAMILY], port, lora_flags(work / "adapter"))
    with serving(arguments, port, work / "log") as running:
        yield running


@contextlib.contextmanager
def serving(arguments: Sequence[str], port: int, log: Path) -> Iterator[Engine]:
    process = processes.Process(arguments, log)
    try:
        process.wait_ready([f"http://127.0.0.1:{port}/health"])
        yield connect(f"http://127.0.0.1:{port}")
    finally:
        process.stop()


@pytest.fixture(scope="session")
def item_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose model takes pictures."""
    directory = tmp_path_factory.mktemp("item-model")
    write_item_model(directory)
    return directory


@pytest.fixture(scope="session")
def item_engine(item_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A serving vLLM for that model, with KV events."""
    (port,) = free_ports(1)
    flags = ["--load-format", "dummy", "--enable-prompt-tokens-details"]
    log = tmp_path_factory.mktemp("item-engine") / "log"
    with serving(serve_arguments(item_model, port, flags), port, log) as running:
        yield running


@pytest.fixture
async def router(models: dict[str, Path]) -> AsyncIterator[LocalTokeniser]:
    """The router's tokeniser for the serving engine's model."""
    tokeniser = open_router_tokeniser(models[SERVED_FAMILY])
    yield tokeniser
    await tokeniser.aclose()


@pytest.fixture(scope="session")
def peer_key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mounted Secret of `pair`."""
    file = tmp_path_factory.mktemp("peer") / "key"
    file.write_bytes(KEY + b"\n")
    return file


@pytest.fixture(scope="session")
def pair(
    models: dict[str, Path], peer_key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PullEngine, PullEngine]]:
    """Two engines of one pool, more patient with each other than by default: no test of what moves depends on
    how fast it does. The first asks dead and mute peers too, so its patience has an end in sight."""
    root = tmp_path_factory.mktemp("pulls")
    site = make_site(root)
    tiers: dict[str, dict[str, object]] = {
        "source": {"max_extra_ttft_s": 10.0, "chunk_bytes": 4 * BLOCK_BYTES},
        "consumer": {"max_extra_ttft_s": 30.0, "chunk_bytes": 4 * BLOCK_BYTES},
    }
    write_adapter(root / "adapter")
    flags = lora_flags(root / "adapter")
    with start_engines(models[SERVED_FAMILY], root, site, peer_key_file, tiers, flags) as engines:
        yield engines["source"], engines["consumer"]


@pytest.fixture
def source(pair: tuple[PullEngine, PullEngine]) -> PullEngine:
    return pair[0]


@pytest.fixture
def consumer(pair: tuple[PullEngine, PullEngine]) -> PullEngine:
    return pair[1]


@pytest.fixture(scope="session")
def reports(pair: tuple[PullEngine, PullEngine]) -> Iterator[Reports]:
    """What the consumer reports of its pulls."""
    yield from _reports(pair[1])


@pytest.fixture(scope="session")
def source_reports(pair: tuple[PullEngine, PullEngine]) -> Iterator[Reports]:
    """What the source reports, where it is the one who asks."""
    yield from _reports(pair[0])


def _reports(engine: PullEngine) -> Iterator[Reports]:
    until(lambda: any(name.startswith("kvpull_engine_info") for name in engine.metrics()))
    subscriber = Reports(int(engine.info()["reports_port"]))
    try:
        yield subscriber
    finally:
        subscriber.close()
