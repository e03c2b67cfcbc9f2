"""docs/metrics.md says what a real picker and a real sidecar show: names, types, labels; both ways."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import grpc
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.telemetry import Telemetry
from tests.integration.app.plain_picker import ROOT, picker
from tests.integration.engine.rig import TOKENIZER
from tests.integration.extproc import client as gateway

DOCUMENT = ROOT / "docs" / "metrics.md"
_ROW = re.compile(r"\| `(\w+)` \| (\w+) \| ([^|]*) \| [^|]+ \|")
Families = dict[str, tuple[str, frozenset[str]]]  # name -> type, labels


def documented(section: str) -> Families:
    text = DOCUMENT.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = {found[1]: (found[2], frozenset(re.findall(r"\w+", found[3]))) for found in _ROW.finditer(text)}
    assert rows, section
    return rows


def shown(page: str) -> Families:
    """Without the `_created` twins; a counter under the name that queries use."""
    families: Families = {}
    for family in text_string_to_metric_families(page):
        if family.name.endswith("_created"):
            continue
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        families[name] = (family.type, frozenset(labels))
    return families


def compare(said: Families, found: Families) -> None:
    assert sorted(said) == sorted(found)
    for name, (kind, labels) in found.items():
        assert kind == said[name][0], name
        assert labels in (said[name][1], frozenset()), name  # no sample yet: no labels to see


async def _ask(port: int) -> None:
    async with await gateway.channel_to(port) as channel:
        stream = gateway.open_stream(channel)
        await stream.write(gateway.headers(("content-type", "application/json")))
        await stream.write(gateway.body(b'{"model": "m", "prompt": "Hello"}', end=True))
        await stream.write(gateway.response_headers())
        await stream.write(gateway.response_body(b"data: {}\n\n", end=True))
        await stream.done_writing()
        async with asyncio.timeout(60):
            while await stream.read() is not grpc.aio.EOF:
                pass


async def test_the_pickers_page(tmp_path: Path) -> None:
    row = {"pod": "a", "host": "127.0.0.1", "serving_port": 9}
    (tmp_path / "endpoints.json").write_text(json.dumps({"endpoints": [row]}))
    async with picker(tmp_path, ("--tokenizer", str(TOKENIZER))) as (_, ports):
        await _ask(ports["grpc_port"])
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{ports['metrics_port']}/metrics") as answer,
        ):
            page = await answer.text()
    compare(documented("Picker"), shown(page))


def test_the_sidecars_page() -> None:
    compare(documented("Sidecar"), shown(generate_latest(Telemetry().registry).decode()))
