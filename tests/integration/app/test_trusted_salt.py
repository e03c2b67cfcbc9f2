"""S-H03 through a real picker and an emulated engine: what tenants share is what the gateway's header says.

The test plays the gateway: it sends the engine the body that the picker answered with.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from epp.request.trusted_salt import TrustedSalt
from tests.integration.app.plain_picker import picker
from tests.integration.engine.rig import BLOCK, EngineClient, StartEngine, prompt_ids
from tests.integration.extproc import client as gateway
from tests.integration.extproc import envoy
from tests.integration.extproc.upstream import Upstream

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


@pytest.mark.timeout(120)
async def test_s_a10_the_new_body_goes_on_through_a_real_envoy_in_both_modes(tmp_path: Path) -> None:
    engine = Upstream("a")
    await engine.start()
    host, _, port = engine.address.rpartition(":")
    row = {"pod": "a", "host": host, "serving_port": int(port)}
    (tmp_path / "endpoints.json").write_text(json.dumps({"endpoints": [row]}))
    plain = b'{"cache_salt": "mine", "prompt": "' + b"z" * 100_000 + b'", "t": 1.10}'
    sent = ((plain, {}), (gzip.compress(plain), {"content-encoding": "gzip"}))
    async with (
        picker(tmp_path, FLAG) as (_, ports),
        envoy.running(ports["grpc_port"], tmp_path, [engine.address]) as urls,
        aiohttp.ClientSession() as session,
    ):
        for mode in ("duplex", "buffered"):
            for body, more in sent:
                headers = {"content-type": "application/json", "x-tenant": "acme", **more}
                url = urls[mode] + "/v1/completions"
                async with session.post(url, data=io.BytesIO(body), headers=headers) as answer:
                    assert answer.status == 200, mode
        async with session.post(
            urls["duplex"], data=b"{", headers={"content-type": "application/json"}
        ) as answer:
            assert answer.status == 400
    await engine.stop()
    salt = TrustedSalt("x-tenant").salt_of(["acme"])[0]
    arrived = [(body, headers) for body, headers in zip(engine.bodies, engine.headers, strict=True) if body]
    assert len(arrived) == 4
    for body, headers in arrived:
        assert body == plain.replace(b'"cache_salt": "mine", ', b'"cache_salt":"%s",' % salt.encode())
        assert not {"x-tenant", "content-encoding"} & headers.keys()
