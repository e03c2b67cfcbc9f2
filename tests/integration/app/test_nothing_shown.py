"""S-H01 of a whole process: at the highest log level no mark of prompt, tokens, salt, tenant or answer is
in its log, on its pages or in its ledger."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.app.plain_picker import picker
from tests.integration.engine.rig import TOKENIZER
from tests.integration.extproc import envoy
from tests.integration.extproc.upstream import Upstream

MARK = "zebra4711"
TOKEN = 471147
DEBUG = {"authorization": "Bearer debug-token"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")


def bodies() -> Iterator[tuple[bytes, dict[str, str]]]:
    """Good, odd and broken ones, with the headers that go with them."""
    said = {
        "model": "m",
        "cache_salt": MARK,
        "prompt": f"{MARK} " * 300,
        "input": f"{MARK} " * 300,
        "system": MARK,
        "token_ids": [TOKEN] * 300,
        "messages": [{"role": "user", "content": f"{MARK} " * 300}],
        "tools": [{"type": "function", "function": {"name": MARK}}],
        "max_tokens": 1,
    }
    for fields in (said, said | {"prompt": [TOKEN] * 300}, said | {"messages": [{MARK: MARK}]}):
        body = json.dumps(fields).encode()
        yield body, {}
        yield body[:-1], {}
        yield body + MARK.encode(), {}
        yield gzip.compress(body), {"content-encoding": "gzip"}
        yield body, {"content-encoding": MARK}
    yield json.dumps({"prompt": f"\ud800 {MARK}"}).encode(), {}
    yield f'{{"prompt": "{MARK}", "a": {TOKEN}{"9" * 5000}, "b": NaN}}'.encode(), {}


@pytest.mark.timeout(120)
async def test_s_h01_nothing_a_client_or_an_engine_says_is_shown(tmp_path: Path) -> None:
    engine = Upstream("a")
    await engine.start()
    host, _, port = engine.address.rpartition(":")
    row = {"pod": "a", "host": host, "serving_port": int(port)}
    files = {name: tmp_path / name for name in ("endpoints.json", "ledger.jsonl", "debug-token", "log")}
    files["endpoints.json"].write_text(json.dumps({"endpoints": [row]}))
    files["debug-token"].write_text("debug-token")
    flags = (
        *("--tokenizer", str(TOKENIZER), "--log-level", "debug", "--ledger-file", str(files["ledger.jsonl"])),
        *(
            "--debug-token-file",
            str(files["debug-token"]),
            "--cache-salt-header",
            "x-tenant",
            "--lame-duck",
            "0s",
        ),
    )
    pages = []
    statuses: set[int] = set()
    with files["log"].open("wb") as log:
        async with (
            picker(tmp_path, flags, log=log) as (process, ports),
            envoy.running(ports["grpc_port"], tmp_path, [engine.address]) as urls,
            aiohttp.ClientSession() as session,
        ):
            for number, (body, more) in enumerate(bodies()):
                for path in PATHS:
                    headers = {
                        "content-type": "application/json",
                        "authorization": f"Bearer {MARK}",
                        "x-request-id": f"{number}{path}",
                        "x-tenant": MARK,
                        **more,
                    }
                    url = urls["duplex"] + "/echo" + path
                    async with session.post(url, data=io.BytesIO(body), headers=headers) as answer:
                        statuses.add(answer.status)
                        if answer.status != 200:  # an error of ours
                            pages.append(await answer.text())
            base = f"http://127.0.0.1:{ports['metrics_port']}"
            asked = (f"decisions/0{PATHS[0]}", "endpoints", "thresholds")
            for page in ("/metrics", *(f"/debug/kvpull/{name}" for name in asked)):
                async with session.get(base + page, headers=DEBUG) as answer:
                    pages.append(await answer.text())
            process.terminate()  # asked, not killed: it writes the rest of its ledger and its log
            assert await asyncio.wait_for(process.wait(), 60) == 0
    await engine.stop()
    assert {200, 400, 415} <= statuses
    written = files["log"].read_text() + files["ledger.jsonl"].read_text()
    assert written.count("decision") > 40  # there was something to look at
    assert logging.getLevelName(logging.DEBUG) in written
    assert any(MARK.encode() in body for body in engine.bodies)  # negative control: it did pass
    assert MARK not in written + "".join(pages)
    assert str(TOKEN) not in written + "".join(pages)
