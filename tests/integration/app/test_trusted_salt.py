"""S-H03 through a real picker and an emulated engine: what tenants share is what the gateway's header says.

The test plays the gateway: it sends the engine the body that the picker answered with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.app.plain_picker import picker
from tests.integration.engine.rig import BLOCK, EngineClient, StartEngine, prompt_ids
from tests.integration.extproc import client as gateway

BLOCKS = 8
PROMPT = prompt_ids(BLOCK * BLOCKS + 5)
FLAG = ("--cache-salt-header", "x-tenant")


async def through(channel: grpc.aio.Channel, fields: dict[str, Any], tenant: str | None) -> tuple[Any, bytes]:
    """The header mutation, and the body that goes on."""
    stream = gateway.open_stream(channel)
    named = () if tenant is None else (("x-tenant", tenant),)
    await stream.write(gateway.headers(("content-type", "application/json"), *named))
    await stream.write(gateway.body(json.dumps(fields).encode(), end=True))
    answer = await stream.read()
    mutation = answer.request_headers.response.header_mutation
    body = b""
    while True:
        piece = (await stream.read()).request_body.response.body_mutation.streamed_response
        body += piece.body
        if piece.end_of_stream:
            break
    await stream.done_writing()
    while await stream.read() is not grpc.aio.EOF:
        pass
    return mutation, body


def folder_of(path: Path, engine: EngineClient) -> Path:
    row = {"pod": "a", "host": engine.host, "serving_port": engine.running.port}
    path.mkdir()
    (path / "endpoints.json").write_text(json.dumps({"endpoints": [row]}))
    return path


async def cached(
    engine: EngineClient, folder: Path, flags: Sequence[str], asked: Sequence[tuple[str | None, str | None]]
) -> list[int]:
    """What the engine found in its cache for each (tenant, the client's salt), one after the other."""
    found = []
    async with picker(folder, flags) as (_, ports), await gateway.channel_to(ports["grpc_port"]) as channel:
        for tenant, salt in asked:
            fields = {"model": "m", "prompt": PROMPT, "max_tokens": 1} | (
                {"cache_salt": salt} if salt else {}
            )
            mutation, body = await through(channel, fields, tenant)
            assert ("x-tenant" in mutation.remove_headers) is bool(flags)
            reply = await engine.post("/v1/completions", json.loads(body))
            assert reply.status == 200, reply.body
            found.append(reply.cached_tokens)
    return found


@pytest.mark.timeout(120)
async def test_tenants_share_with_themselves_only(start_engine: StartEngine, tmp_path: Path) -> None:
    engine = await start_engine()
    whole = BLOCK * BLOCKS
    asked = [
        ("acme", None),
        ("mallory", None),
        ("acme", "whatever"),
        (None, "whatever"),
        (None, "whatever"),  # nobody vouches for it: not even with itself
        ("mallory", "acme"),
    ]
    assert await cached(engine, folder_of(tmp_path / "on", engine), FLAG, asked) == [0, 0, whole, 0, 0, whole]
    await engine.reset(cpu_too=True)
    # negative control: without the flag the clients' word counts, whoever they are
    asked = [("acme", "secret"), ("mallory", "secret"), ("mallory", None)]
    assert await cached(engine, folder_of(tmp_path / "off", engine), (), asked) == [0, whole, 0]
