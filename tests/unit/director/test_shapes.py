"""Requests of every shape and adapter through parser, tokenizer, index and decision."""

from __future__ import annotations

from typing import Any

import pytest

from epp.request.chat_template import ChatTemplate
from epp.request.local_tokenizer import LocalTokenizer
from tests.unit.core.test_endpoint_picker import BLOCK
from tests.unit.director.rig import BASE, TOKENIZER_DIRECTORY, Rig

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
USER = {"role": "user", "content": "What is it about?"}


def completion(model: str | None = BASE, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": TEXT} | more


# --- adapters (S-C11, S-H06) ------------------------------------------------------------------------


async def test_s_c11_an_adapter_request_hits_the_adapters_blocks_only() -> None:
    rig = Rig()
    held = await rig.hold("a", completion())
    assert await rig.hold("b", completion(), lora_name="sql-adapter") == held > 0
    assert await rig.cached_tokens(completion()) == {"a": held}
    assert await rig.cached_tokens(completion("sql-adapter")) == {"b": held}


async def test_s_h06_a_name_nobody_serves_hits_nothing() -> None:
    rig = Rig()
    await rig.hold("a", completion())
    assert await rig.cached_tokens(completion("other-adapter")) == {}


@pytest.mark.parametrize("model", [None, ""])
async def test_a_request_without_a_model_is_for_the_base_model(model: str | None) -> None:
    rig = Rig()
    held = await rig.hold("a", completion())
    assert await rig.cached_tokens(completion(model)) == {"a": held}


async def test_without_a_known_base_model_nothing_is_claimed(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    held = await rig.hold("a", completion())
    for pod in "abc":
        rig.serves(pod, None)
    assert await rig.cached_tokens(completion()) == await rig.cached_tokens(completion()) == {}
    assert caplog.text.count("servedModelNames") == 1
    rig.serves("c", BASE)
    assert await rig.cached_tokens(completion()) == {"a": held}


async def test_kinds_of_model_names_are_counted() -> None:
    rig = Rig()
    for model in (BASE, "", "adapter-1", "adapter-2"):
        await rig.route(completion(model))
    assert rig.value('kvpull_epp_requests_by_model_total{model="base"}') == 1
    assert rig.value('kvpull_epp_requests_by_model_total{model="none"}') == 1
    assert rig.value('kvpull_epp_requests_by_model_total{model="other"}') == 2
    assert "adapter-1" not in rig.metrics_page()


# --- every API finds its own prompt again ------------------------------------------------------------

CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": [TEXT, "b"]}),
    ("/v1/completions", {"prompt": list(range(100, 500))}),
    ("/v1/completions", {"prompt": [list(range(100, 500)), [1]]}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": TEXT}, USER]}),
    ("/v1/responses", {"input": TEXT}),
    ("/v1/responses", {"instructions": TEXT, "input": [USER]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]}),
    ("/v1/messages", {"system": TEXT, "messages": [USER], "max_tokens": 5}),
    ("/v1/messages", {"system": [{"type": "text", "text": TEXT}], "messages": [USER], "max_tokens": 5}),
    ("/inference/v1/generate", {"token_ids": list(range(100, 500)), "sampling_params": {}}),
]


@pytest.mark.parametrize(("path", "fields"), CASES)
async def test_s_b04_s_b05_the_second_request_hits(path: str, fields: dict[str, Any]) -> None:
    rig = Rig()
    request = {"model": BASE} | fields
    held = await rig.hold("b", request, path)
    assert held >= 300
    assert await rig.cached_tokens(request, path) == {"b": held}
    salted = request | {"cache_salt": "tenant-a"}
    assert await rig.cached_tokens(salted, path) == {}


async def test_messages_and_chat_of_one_conversation_share_their_blocks() -> None:
    rig = Rig()
    chat = {"model": BASE, "messages": [{"role": "system", "content": TEXT}, USER]}
    held = await rig.hold("a", chat, "/v1/chat/completions")
    anthropic = {"model": BASE, "system": TEXT, "messages": [USER], "max_tokens": 5}
    assert await rig.cached_tokens(anthropic, "/v1/messages") == {"a": held}


async def test_s_b03_other_tools_are_another_prefix() -> None:
    rig = Rig()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}
    other = {"type": "function", "function": {"name": "f", "parameters": {"b": 2, "a": 1}}}
    chat = {"model": BASE, "messages": [{"role": "system", "content": TEXT}, USER]}
    path = "/v1/chat/completions"
    held = await rig.hold("a", chat | {"tools": [tool]}, path)
    assert await rig.cached_tokens(chat | {"tools": [tool]}, path) == {"a": held}
    assert (await rig.cached_tokens(chat | {"tools": [other]}, path)).get("a", 0) < 32
    assert (await rig.cached_tokens(chat, path)).get("a", 0) < 32


async def test_s_b07_the_whole_conversation_decides() -> None:
    rig = Rig()
    path = "/v1/chat/completions"
    system = {"role": "system", "content": TEXT}
    users = {
        pod: {"model": BASE, "messages": [system, {"role": "user", "content": word * 200}]}
        for pod, word in (("a", "apple "), ("b", "pear "))
    }
    held = {pod: await rig.hold(pod, fields, path) for pod, fields in users.items()}
    for pod, fields in users.items():
        cached = await rig.cached_tokens(fields, path)
        assert cached.pop(pod) == held[pod]
        assert all(0 < tokens < held[pod] - 150 for tokens in cached.values())


async def test_s_b13_only_real_token_matches_count() -> None:
    """A template with a blank before answers: what was generated has none, so the history that comes
    back matches up to the end of the first prompt, and not a token further."""
    shipped = LocalTokenizer.load(TOKENIZER_DIRECTORY)
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ ' ' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rig = Rig(LocalTokenizer(shipped._tokenizer, chat_template=ChatTemplate(source)))
    path = "/v1/chat/completions"
    turn = {"role": "user", "content": TEXT}
    await rig.route({"model": BASE, "messages": [turn]}, path)
    first = list(rig.requests[-1].token_ids or ())
    answer = "Foxes and dogs. " * 60
    rig.hold_ids("a", [*first, *shipped.encode(answer, add_special_tokens=False)])
    history = {"model": BASE, "messages": [turn, {"role": "assistant", "content": answer}, USER]}
    cached = (await rig.cached_tokens(history, path))["a"]
    assert 0 < len(first) - cached < 2 * BLOCK


@pytest.mark.parametrize(
    ("continued", "generated", "reason"),
    [(False, True, None), (False, False, None), (True, False, None), (True, True, "tokenizer")],
)
async def test_s_b06_the_four_combinations(continued: bool, generated: bool, reason: str | None) -> None:
    """Each legal one is its own prompt; the illegal one is the engine's to refuse."""
    rig = Rig()
    path = "/v1/chat/completions"
    messages = [USER, {"role": "assistant", "content": TEXT}]
    flags = {"continue_final_message": continued, "add_generation_prompt": generated}
    request = {"model": BASE, "messages": messages} | flags
    await rig.route(request, path)
    ids = rig.requests[-1].token_ids
    assert (ids is None) == (reason is not None)
    assert rig.value('kvpull_epp_untokenised_requests_total{reason="tokenizer"}') == float(ids is None)
    if ids is not None:
        text = rig.tokeniser._tokenizer.decode(ids)
        assert text.endswith(TEXT.rstrip()) or text.endswith(TEXT) or not continued
        assert text.endswith("<|assistant|>") == generated


async def test_s_a05_bodiless_requests_are_routed() -> None:
    rig = Rig()
    for path in ("/v1/models", "/health", "/v1/completions"):
        assert (await rig.route({}, path, body=b"")).destination
    assert rig.value('kvpull_epp_untokenised_requests_total{reason="no_body"}') == 3


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/pooling", "/tokenize"])
async def test_s_b08_other_shapes_are_routed(path: str) -> None:
    rig = Rig()
    routing = await rig.route({"model": BASE, "input": TEXT}, path)
    assert routing.body is None  # the client's bytes
    assert rig.value('kvpull_epp_untokenised_requests_total{reason="path"}') == 1


async def test_a_grpc_call_is_placed_by_its_own_tokens() -> None:
    """vLLM's gRPC API through parser, index and decision; the engine gets the bytes as they came."""
    rig = Rig()
    held = rig.hold_ids("b", range(100, 100 + 4 * BLOCK))
    ids = bytes(range(100, 128)) + b"".join(
        bytes([n & 127 | 128, n >> 7]) for n in range(128, 100 + 4 * BLOCK)
    )
    assert 4 * BLOCK == held < 1_000
    tokenized = b"\x12" + _varint(len(ids)) + ids
    message = b"\x12" + _varint(len(tokenized)) + tokenized
    body = b"\0" + len(message).to_bytes(4) + message
    path = "/vllm.grpc.engine.VllmEngine/Generate"
    routing = await rig.route({}, path, body=body, headers=(("content-type", "application/grpc"),))
    assert routing.body is None
    assert list(rig.requests[-1].token_ids or ()) == list(range(100, 100 + 4 * BLOCK))
    picker = rig.pool.picker
    matches = picker.cache.match(rig.requests[-1], [e.id for e in picker.endpoints])
    assert {e.pod: match.cached_tokens for e, match in matches.items()} == {"a": 0, "b": held, "c": 0}


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)
