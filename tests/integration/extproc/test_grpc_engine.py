"""vLLM's gRPC API from end to end: gRPC client -> Envoy -> the picker's own director -> gRPC engine.

Client, gateway, ext_proc and engines speak real HTTP/2; messages are written here field by field, so that no
code of the picker reads back what it wrote itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from engine_plugin.identity import EndpointId
from epp.core.types import Endpoint, Outcome
from epp.director import Director
from epp.extproc.server import ExtProcServer, ServerSettings
from tests.integration.extproc import envoy
from tests.unit.core.test_endpoint_picker import BLOCK
from tests.unit.director.rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVICE = "vllm.grpc.engine.VllmEngine"
# as in vllm_engine.proto: GenerateResponse.chunk 1 and .complete 2 with token ids, prompt, completion and
# cached tokens; EmbedResponse.embedding 1 and .prompt_tokens 2
CHUNK = bytes.fromhex("0a0a0a020506100a18022008")
COMPLETE = bytes.fromhex("12150a03050607120473746f70180a2003280862027b7d")
EMBEDDING = bytes.fromhex("0a080000003f0000803e10091802")


@dataclass
class Engine:
    """A gRPC server that keeps what it was asked, and hands out its second message when it is told to."""

    name: str
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    port: int = 0
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self.server = grpc.aio.server()
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
            "Embed": grpc.unary_unary_rpc_method_handler(self.embed),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()

    async def generate(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        self._note("Generate", request, context)
        if request.endswith(b"refuse"):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the engine is full")
        yield CHUNK
        if self.hold is not None:
            await self.hold.wait()
        yield COMPLETE
        context.set_trailing_metadata((("x-engine", self.name),))

    async def embed(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self._note("Embed", request, context)
        return EMBEDDING

    def _note(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> None:
        self.asked.append((method, request))
        self.seen.append(dict(context.invocation_metadata() or ()))


class Books:
    """The director, and whether everything that it decided has ended."""

    def __init__(self, director: Director) -> None:
        self.decide, self.first_token = director.decide, director.first_token
        self._finished = director.finished
        self.ended = asyncio.Event()

    def finished(self, token: object, outcome: Outcome) -> None:
        self._finished(token, outcome)
        self.ended.set()


@dataclass
class Fleet:
    rig: Rig
    engines: dict[str, Engine]
    books: Books
    channel: grpc.aio.Channel

    def generate(self, request: bytes) -> Any:
        return self.channel.unary_stream(f"/{SERVICE}/Generate")(request, timeout=30)

    async def settled(self) -> None:
        """The picker has heard the end of the last request."""
        async with asyncio.timeout(10):
            await self.books.ended.wait()
        self.books.ended.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    rig, engines = Rig(), {name: Engine(name) for name in "abc"}
    books = Books(rig.director)
    picker = rig.pool.picker
    for name, engine in engines.items():
        await engine.start()
        endpoint_id = EndpointId(name)
        picker.upsert_endpoint(Endpoint(endpoint_id, "127.0.0.1", engine.port))
        picker.cache.on_connect(endpoint_id, 0.0)
        picker.cache.on_replay_end(endpoint_id, True, 0.0)
        rig.serves(name, "base-model")
    settings = ServerSettings(host="127.0.0.1", port=0, health_port=None, lame_duck_s=0.0)
    server = ExtProcServer(books, ready=lambda: True, settings=settings)
    await server.start()
    try:
        async with envoy.running(server.port, tmp_path_factory.mktemp("envoy"), []) as urls:
            address = urls["grpc"].removeprefix("http://")
            async with grpc.aio.insecure_channel(address) as channel:
                yield Fleet(rig, engines, books, channel)
    finally:
        await server.drain(10)
        await server.stop()
        for engine in engines.values():
            assert engine.server is not None
            await engine.server.stop(None)


@pytest.fixture
def fleet(running: Fleet) -> Fleet:
    for engine in running.engines.values():
        engine.asked.clear()
        engine.seen.clear()
        engine.hold = None
    return running


def message(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(value: int) -> bytes:
    low, value = value & 127, value >> 7
    return bytes([low | 128]) + varint(value) if value else bytes([low])


def generate_request(token_ids: list[int], request_id: bytes = b"r1") -> bytes:
    packed = b"".join(map(varint, token_ids))
    return message(1, request_id) + message(2, message(2, packed))


async def test_a_prompt_goes_to_the_engine_that_holds_it_and_the_call_is_whole(fleet: Fleet) -> None:
    """Exact tokens are matched, frames pass byte-identical, trailers reach the client, usage is counted."""
    token_ids = list(range(1000, 1000 + 4 * BLOCK + 3))
    for holder in "cab":
        ids = [number + 7 * ord(holder) for number in token_ids]
        fleet.rig.hold_ids(holder, ids)
        request = generate_request(ids)
        call = fleet.generate(request)
        assert [answer async for answer in call] == [CHUNK, COMPLETE]
        assert await call.code() == grpc.StatusCode.OK
        assert dict(await call.trailing_metadata())["x-engine"] == holder
        assert fleet.engines[holder].asked[-1] == ("Generate", request)
        fleet.engines[holder].asked.clear()
        await fleet.settled()
    assert [engine.asked for engine in fleet.engines.values()] == [[], [], []]
    values = {
        name: fleet.rig.value(f"llm_d_epp_request_{name}_tokens_sum")
        for name in ("input", "output", "cached")
    }
    assert values == {"input": 30.0, "output": 9.0, "cached": 24.0}
    load = [fleet.rig.pool.picker.ledger.load(EndpointId(name)).requests for name in "abc"]
    assert load == [0, 0, 0]


async def test_answers_are_streamed_and_the_first_one_ends_the_prefill(fleet: Fleet) -> None:
    for engine in fleet.engines.values():
        engine.hold = asyncio.Event()
    ids = list(range(5, 5 + 3 * BLOCK))
    call = fleet.generate(generate_request(ids))
    assert await call.read() == CHUNK, "nothing was held back"
    picker = fleet.rig.pool.picker
    loads = {name: picker.ledger.load(EndpointId(name)) for name in "abc"}
    (busy,) = [name for name, load in loads.items() if load.requests]
    assert loads[busy].uncached_prompt_tokens == 0, "its prompt is computed"
    for engine in fleet.engines.values():
        assert engine.hold is not None
        engine.hold.set()
    assert await call.read() == COMPLETE
    assert await call.read() is grpc.aio.EOF
    await fleet.settled()
    assert picker.ledger.load(EndpointId(busy)).requests == 0


async def test_an_embedding_is_a_call_like_others(fleet: Fleet) -> None:
    ids = list(range(9, 9 + 2 * BLOCK))
    fleet.rig.hold_ids("b", ids)
    request = message(1, b"e1") + message(2, message(2, b"".join(map(varint, ids))))
    answer = await fleet.channel.unary_unary(f"/{SERVICE}/Embed")(request, timeout=30)
    assert answer == EMBEDDING
    assert fleet.engines["b"].asked == [("Embed", request)]
    await fleet.settled()


async def test_an_engines_refusal_is_the_clients(fleet: Fleet) -> None:
    """Trailers without a message; the picker's books are even afterwards."""
    call = fleet.generate(message(1, b"refuse"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.details() == "the engine is full"
    await fleet.settled()
    picker = fleet.rig.pool.picker
    assert [picker.ledger.load(EndpointId(name)).requests for name in "abc"] == [0, 0, 0]


async def test_a_client_cannot_name_the_engines_source(fleet: Fleet) -> None:
    metadata = (("x-kv-cache-source-host-port", "10.9.9.9:1"), ("x-prefiller-host-port", "10.9.9.9:1"))
    call = fleet.channel.unary_stream(f"/{SERVICE}/Generate")(
        generate_request([3] * BLOCK), timeout=30, metadata=metadata
    )
    assert [answer async for answer in call] == [CHUNK, COMPLETE]
    (seen,) = [found for engine in fleet.engines.values() for found in engine.seen]
    assert {"x-kv-cache-source-host-port", "x-prefiller-host-port"} & set(seen) == set()
    assert seen["x-kvpull-decision-id"]
    await fleet.settled()
