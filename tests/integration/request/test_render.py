"""The render back end against real servers: the engine's ids, or no match within the budget, counted."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import json
import logging
import re
import ssl
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from epp.request.circuit_breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import ChatPrompt, TextPrompt, TokenPrompt, parse_request
from epp.request.render import RenderLimits, RenderTokeniser

BOUND_S = 30.0
SHORT_S = 0.1
PATIENT = RenderLimits(budget_s=BOUND_S)
TOKENIZER = LocalTokenizer.load(Path(__file__).resolve().parents[3] / "config" / "tokenizer")
CHAT = ChatPrompt([{"role": "user", "content": "zebra"}])

Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """Renders as vLLM 0.32 does, with the shipped tokenizer; keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], dict[str, str]]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        self.calls.append((request.path, fields, {k.lower(): v for k, v in request.headers.items()}))
        if request.path == "/v1/completions/render":
            ids = TOKENIZER.encode(fields["prompt"], fields["add_special_tokens"])
            return web.json_response([_generate(ids)])
        text = TOKENIZER.render_chat(
            fields["messages"],
            fields.get("tools"),
            fields["add_generation_prompt"],
            continue_final_message=fields["continue_final_message"],
            **fields.get("chat_template_kwargs", {}),
        )
        return web.json_response(_generate(TOKENIZER.encode(text, fields["add_special_tokens"])))


class RendersResponses:
    """Says that it was asked, and the same for everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.calls.append((request.path, await request.json()))
        return web.json_response(_generate([4, 5]))


def _generate(ids: list[int], **others: Any) -> dict[str, Any]:
    return {"request_id": "x", "token_ids": ids, "features": None, "sampling_params": {"n": 1}} | others


@asynccontextmanager
async def http_server(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Answers every POST with `handler`; yields the base URL."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_server(connection: Connection) -> AsyncIterator[str]:
    """Reads a request, then does with the connection what `connection` does; yields the base URL."""

    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length))
            await connection(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        if tasks:
            done, late = await asyncio.wait(tasks, timeout=BOUND_S)
            assert not late
            for task in done:
                task.result()


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)  # until the client gives up


def answering(head: bytes, body: bytes) -> Connection:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"\r\n\r\n" + body)
        await writer.drain()

    return answer


@asynccontextmanager
async def tokeniser(
    *members: str, limits: RenderLimits = PATIENT, **kw: Any
) -> AsyncIterator[RenderTokeniser]:
    service = RenderTokeniser(lambda: members, limits=limits, **kw)
    try:
        yield service
    finally:
        await service.aclose()


async def unused_address() -> str:
    async with raw_server(silence) as url:
        return url


# --- the engine's tokens --------------------------------------------------------------------------
async def test_ids_are_the_engines() -> None:
    engine = Engine()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    tools = [{"type": "function", "function": {"name": "f", "description": None, "parameters": {}}}]
    prompt = ChatPrompt(messages, tools, False, True, {"enable_thinking": True})
    async with http_server(engine) as url, tokeniser(url) as service:
        chat = await service.token_ids(prompt)
        text = await service.token_ids(TextPrompt("The harbour was quiet."))
        bare = await service.token_ids(TextPrompt("The harbour was quiet.", add_special_tokens=False))
    rendered = TOKENIZER.render_chat(messages, tools, False, continue_final_message=True)
    assert chat == array("I", TOKENIZER.encode(rendered, False))
    assert text == array("I", TOKENIZER.encode("The harbour was quiet.", True))
    assert bare == array("I", TOKENIZER.encode("The harbour was quiet.", False))
    assert service.counters.outcomes == {"rendered": 3}
    assert service.counters.encoded_tokens == sum(map(len, (chat, text, bare)))
    assert engine.calls[0][1]["chat_template_kwargs"] == {"enable_thinking": True}
    assert "model" not in engine.calls[0][1]


async def test_model_and_key_go_with_the_call() -> None:
    engine = Engine()
    headers = {"authorization": "Bearer k3y"}
    async with http_server(engine) as url, tokeniser(url, model="m", headers=headers) as service:
        assert await service.token_ids(CHAT) is not None
    ((path, fields, sent),) = engine.calls
    assert (path, fields["model"], sent["authorization"]) == (
        "/v1/chat/completions/render",
        "m",
        "Bearer k3y",
    )


async def test_given_ids_cost_no_call() -> None:
    async with tokeniser() as service:
        assert await service.token_ids(TokenPrompt([1, 2])) == [1, 2]
        assert service.counters.outcomes == {"given": 1}


async def test_members_take_turns() -> None:
    first, second = Engine(), Engine()
    async with http_server(first) as a, http_server(second) as b, tokeniser(a, b) as service:
        for _ in range(4):
            assert await service.token_ids(CHAT) is not None
    assert (len(first.calls), len(second.calls)) == (2, 2)


async def test_a_member_that_refuses_costs_nothing_but_a_second_call() -> None:
    engine, gone = Engine(), await unused_address()
    async with http_server(engine) as url, tokeniser(gone, url) as service:
        for _ in range(2 * FAILURES_TO_OPEN + 2):
            assert await service.token_ids(CHAT) is not None
        assert service.open_breakers == 1
    assert service.counters.outcomes == {"rendered": 2 * FAILURES_TO_OPEN + 2}


# --- faults: no match, counted, bounded --------------------------------------------------------------
@pytest.mark.parametrize(
    ("connection", "reason"),
    [
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9", b"not json."), "answer"),
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 100", b"cut short"), "connection"),
        (
            answering(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 0", b""),
            "answer_encoding",
        ),
        (answering(b"HTTP/1.1 302 Found\r\nlocation: /other\r\ncontent-length: 0", b""), "status"),
        (answering(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0", b""), "forbidden"),
        (answering(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0", b""), "no_render_endpoint"),
        (answering(b"HTTP/1.1 503 No\r\ncontent-length: 0", b""), "status_5xx"),
        (answering(b"nonsense", b""), "connection"),
    ],
)
async def test_a_bad_answer_is_no_match(connection: Connection, reason: str) -> None:
    async with raw_server(connection) as url, tokeniser(url) as service:
        assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {reason: 1}


@pytest.mark.parametrize(
    "ids", [[], [-1], [2**32], ["1"], [1.5], [None], None, {"0": 1}, [[1]], [True]], ids=repr
)
async def test_wrong_ids_are_no_match(ids: Any) -> None:
    body = json.dumps(_generate(ids)).encode()
    async with (
        raw_server(answering(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}".encode(), body)) as url,
        tokeniser(url) as service,
    ):
        assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {"answer": 1}


async def test_refused_connection_is_no_match() -> None:
    async with tokeniser(await unused_address()) as service:
        assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {"connection": 1}


async def test_a_stalled_server_costs_the_budget_and_then_nothing() -> None:
    """The breaker: after a few late answers nobody waits any more, until its pause is over."""
    now_s = [0.0]
    limits = RenderLimits(budget_s=SHORT_S)
    async with raw_server(silence) as url, tokeniser(url, limits=limits, clock=lambda: now_s[0]) as service:
        for _ in range(FAILURES_TO_OPEN):
            assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {"late": FAILURES_TO_OPEN}
        for _ in range(5):
            assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {"late": FAILURES_TO_OPEN, "no_member": 5}
        now_s[0] += FIRST_PAUSE_S
        assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes["late"] == FAILURES_TO_OPEN + 1, "one probe"


async def test_slow_bytes_do_not_stretch_the_budget() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while True:  # until the client closes: always something new, never enough
            writer.write(b" ")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHORT_S / 10):
                    await reader.read(1 << 16)
                    return

    async with raw_server(drip) as url, tokeniser(url, limits=RenderLimits(budget_s=SHORT_S)) as service:
        assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {"late": 1}


async def test_a_huge_answer_is_cut_off() -> None:
    closed = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b" " * 65536)
                await writer.drain()
        finally:
            closed.set()

    limits = RenderLimits(budget_s=BOUND_S, max_answer_bytes=1 << 20)
    async with raw_server(flood) as url, tokeniser(url, limits=limits) as service:
        assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {"answer_size": 1}
        async with asyncio.timeout(BOUND_S):
            await closed.wait()


async def test_the_engines_own_refusal_is_not_its_fault() -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async with http_server(refuse) as url, tokeniser(url) as service:
        for _ in range(2 * FAILURES_TO_OPEN):
            assert await service.token_ids(CHAT) is None
        assert service.open_breakers == 0
        assert service.counters.outcomes == {"refused": 2 * FAILURES_TO_OPEN}


PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}
WITH_PICTURE = ChatPrompt([{"role": "user", "content": [PICTURE]}], items=frozenset(("image",)))


async def test_pictures_are_asked_for_only_where_they_have_a_budget_of_their_own() -> None:
    """The endpoint fetches and decodes them. What it says is matched up to the first of them."""
    calls = []

    async def pictures(request: web.Request) -> web.StreamResponse:
        calls.append(await request.json())
        places = {"image": [{"offset": 5, "length": 2}, {"offset": 2, "length": 2}], "audio": []}
        features = {"mm_hashes": {"image": ["x", "y"], "audio": []}, "mm_placeholders": places}
        return web.json_response(_generate([1, 2, 9, 9, 3, 9, 9], features=features))

    async with http_server(pictures) as url:
        async with tokeniser(url) as service:
            assert await service.token_ids(WITH_PICTURE) is None
            assert service.counters.outcomes == {"multimodal_off": 1}
        limits = RenderLimits(budget_s=SHORT_S, items_budget_s=BOUND_S)
        async with tokeniser(url, limits=limits) as service:
            assert await service.token_ids(WITH_PICTURE) == array("I", [1, 2])
    (call,) = calls
    assert call["messages"] == WITH_PICTURE.messages
    assert call["mm_payload"] == "none"


@pytest.mark.parametrize(
    ("places", "outcome"),
    [
        ({"image": [{"offset": 0, "length": 1}]}, "refused"),
        ({"image": []}, "answer"),
        ({"image": [{"offset": 3, "length": 1}]}, "answer"),
        ({"image": [{"offset": -1, "length": 1}]}, "answer"),
        ({"image": 5}, "answer"),
    ],
)
async def test_pictures_without_a_text_in_front_or_a_place_are_no_match(
    places: dict[str, Any], outcome: str
) -> None:
    async def pictures(_: web.Request) -> web.StreamResponse:
        return web.json_response(_generate([1, 2, 3], features={"mm_placeholders": places}))

    limits = RenderLimits(items_budget_s=BOUND_S)
    async with http_server(pictures) as url, tokeniser(url, limits=limits) as service:
        assert await service.token_ids(WITH_PICTURE) is None
        assert set(service.counters.outcomes) == {outcome}


async def test_too_many_and_too_large_are_no_match_at_once() -> None:
    limits = RenderLimits(budget_s=BOUND_S, max_in_flight=1, max_body_bytes=1000)
    arrived = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await silence(reader, writer)

    async with raw_server(hold) as url, tokeniser(url, limits=limits) as service:
        assert await service.token_ids(TextPrompt("x" * 1000)) is None
        waiting = asyncio.create_task(service.token_ids(CHAT))
        async with asyncio.timeout(BOUND_S):
            await arrived.wait()
        assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {"too_large": 1, "overloaded": 1}
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert service.open_breakers == 0, "a client that leaves is not the member's fault"


async def test_what_cannot_be_written_is_no_match() -> None:
    async with tokeniser(await unused_address()) as service:
        assert await service.token_ids(TextPrompt("\ud800")) is None
        assert await service.token_ids(ChatPrompt([{"role": "user", "content": 2**80}])) is None
        assert service.counters.outcomes == {"unwritable": 2}


def _answered_call(function: dict[str, Any]) -> ChatPrompt:
    call = {"id": "call-1", "function": function, "type": "function"}
    return ChatPrompt([{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "zebra"}])


async def test_arguments_of_calls_go_as_the_text_that_the_engine_takes() -> None:
    """Only a text passes the engine's validation of chats; it decodes it to the same object."""
    engine = Engine()
    arguments = {"z": [1, 2.5], "a": "\u00e4"}
    prompt = _answered_call({"arguments": arguments, "name": "f"})
    async with http_server(engine) as url, tokeniser(url) as service:
        assert await service.token_ids(prompt) is not None
    (sent,) = engine.calls[0][1]["messages"][0]["tool_calls"]
    text = sent["function"]["arguments"]
    assert isinstance(text, str)
    assert list(json.loads(text).items()) == list(arguments.items())
    assert prompt == _answered_call({"arguments": arguments, "name": "f"}), "the prompt is not ours to change"


async def test_calls_that_the_engine_would_reorder_are_asked_for_as_they_came_or_not_at_all() -> None:
    """Templates print the keys of a call in their order; the engine's validation of chats has one of its
    own, which is not the one in which /v1/responses renders them: that has an endpoint of its own."""
    engine = RendersResponses()
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    fields = {"model": "m", "input": [call, {"role": "user", "content": "zebra"}], "max_output_tokens": 5}
    prompt = parse_request(json.dumps(fields).encode(), "/v1/responses", {}).prompt
    assert isinstance(prompt, ChatPrompt)
    async with http_server(engine) as url, tokeniser(url) as service:
        assert await service.token_ids(prompt) == array("I", [4, 5])
        assert await service.token_ids(replace(prompt, origin=None)) is None
        assert service.counters.outcomes == {"rendered": 1, "unwritable": 1}
    assert engine.calls == [("/v1/responses/render", {"input": fields["input"]})]


async def test_switched_off_thinking_is_no_match() -> None:
    """The endpoint renders it in another way than the server does."""
    async with tokeniser(await unused_address()) as service:
        assert await service.token_ids(replace(CHAT, thinking_disabled=True)) is None
        assert service.counters.outcomes == {"unwritable": 1}


async def test_tools_that_may_not_be_called_are_said_to_the_engine() -> None:
    """Its flags decide whether the template sees them."""
    engine = Engine()
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with http_server(engine) as url, tokeniser(url) as service:
        assert await service.token_ids(replace(CHAT, tools=tools, tools_off=True)) is not None
        assert await service.token_ids(replace(CHAT, tools=tools)) is not None
    assert [fields.get("tool_choice") for _, fields, _ in engine.calls] == ["none", None]


async def test_no_member_is_no_match() -> None:
    async with tokeniser() as service:
        assert await service.token_ids(CHAT) is None
        assert service.counters.outcomes == {"no_member": 1}


async def test_logs_name_the_member_and_the_reason_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    bad = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5", b"zebra")
    headers = {"authorization": "Bearer k3y"}
    with caplog.at_level(logging.DEBUG):
        async with raw_server(bad) as url, tokeniser(url, headers=headers) as service:
            for _ in range(FAILURES_TO_OPEN + 3):
                assert await service.token_ids(CHAT) is None
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("epp.")]
    assert url in line
    assert "answer" in line
    assert "zebra" not in caplog.text
    assert "k3y" not in caplog.text


# --- TLS --------------------------------------------------------------------------------------------
def _certificate(directory: Path) -> Path:
    """A certificate for 127.0.0.1 that is its own authority, key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - dt.timedelta(hours=1))
    builder = builder.not_valid_after(now + dt.timedelta(hours=1)).add_extension(address, critical=False)
    path = directory / "tls.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    return path


async def test_a_server_is_believed_by_its_certificate_only(tmp_path: Path) -> None:
    path = _certificate(tmp_path)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(path)
    trusting, strict = ssl.create_default_context(cafile=path), ssl.create_default_context()
    async with http_server(Engine(), tls=server) as url:
        async with tokeniser(url, tls=trusting) as service:
            assert await service.token_ids(CHAT) is not None
        async with tokeniser(url, tls=strict) as service:
            assert await service.token_ids(CHAT) is None
            assert service.counters.outcomes == {"connection": 1}
