"""Ask the real processors; writes tests/data/parity/pictures.tsv.

Usage: python -m tests.engine.record_pictures PACKAGES, a directory with torchvision 0.28.0, num2words and
soundfile with cffi (`pip install --no-deps --target`). vLLM's environment has none of them: on the package
index torchvision has no build for CPUs (see with_torchvision/).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp

from tests.engine import processes
from tests.engine.test_parity import engine_session
from tests.parity import record
from tests.parity.corpus import Case
from tests.parity.ours import JSON_HEADERS
from tests.parity.pictures import KINDS, RECORD, picture_cases, write_kind
from tests.ports import free_ports

_HERE = Path(__file__).resolve().parent


async def in_front(session: aiohttp.ClientSession, url: str, case: Case) -> record.Answer:
    """The engine's token ids of `case` up to its first item."""
    async with session.post(f"{url}{case.path}/render", data=case.body, headers=JSON_HEADERS) as response:
        answer = await response.json()
        if response.status != 200:
            print(f"{case.key}: HTTP {response.status}")
            return record.REFUSED
    ids: list[int] = answer["token_ids"]
    places = (answer.get("features") or {}).get("mm_placeholders") or {}
    return ids[: min((place["offset"] for row in places.values() for place in row), default=len(ids))]


async def ask(urls: dict[str, str]) -> dict[str, record.Answer]:
    async with engine_session() as session:
        return {
            case.key: await in_front(session, urls[kind.name], case)
            for kind in KINDS
            for case in picture_cases(kind)
        }


def main(packages: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        for kind in KINDS:
            write_kind(kind, root / kind.name)
        digest = record.digest_of_all((root / kind.name, picture_cases(kind)) for kind in KINDS)
        path = {"PYTHONPATH": f"{_HERE / 'with_torchvision'}:{packages}"}
        script = str(_HERE / "picture_models.py")
        subprocess.run([str(processes.PYTHON), script, str(root)], env=path, check=True)
        ports = dict(zip((kind.name for kind in KINDS), free_ports(len(KINDS)), strict=True))
        words = [f"{port}={root / name}" for name, port in ports.items()]
        server = processes.Process([str(_HERE / "render_servers.py"), *words], root / "log", path)
        try:
            urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
            server.wait_ready([f"{url}/health" for url in urls.values()], timeout_s=3600.0)
            record.write_record(RECORD, digest, asyncio.run(ask(urls)))
        finally:
            server.stop(politely=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
