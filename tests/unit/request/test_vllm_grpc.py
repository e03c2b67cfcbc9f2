"""vLLM's gRPC request in a body. Hex texts were made by the classes of smg-grpc-proto 0.4.28."""

from __future__ import annotations

import pytest

from epp.request.parse import RequestKind, TextPrompt, TokenPrompt, parse_request
from epp.request.shapes.vllm_grpc import GRPC_PATHS

GENERATE, EMBED = GRPC_PATHS
HEADERS = {"content-type": "application/grpc"}


def framed(message: str, flags: int = 0) -> bytes:
    data = bytes.fromhex(message)
    return bytes([flags]) + len(data).to_bytes(4) + data


TOKENIZED = framed("0a017212100a0178120b01ac02f09309ffffffff0f220a0d0000003f4003520161280142027b7d")


def test_token_ids_are_taken_as_they_are() -> None:
    request = parse_request(TOKENIZED, GENERATE, HEADERS)
    assert isinstance(request.prompt, TokenPrompt)
    assert list(request.prompt.token_ids) == [1, 300, 150_000, 4_294_967_295]
    assert (request.kind, request.prompts, request.stream) == (RequestKind.TOKENS_IN, 1, True)
    assert (request.model, request.size_bytes) == ("", len(TOKENIZED))


def test_a_text_is_a_text() -> None:
    request = parse_request(framed("1a0548656c6c6f"), "/behind/a/prefix" + GENERATE, HEADERS)
    assert (request.prompt, request.stream) == (TextPrompt("Hello"), False)


def test_an_embed_request_has_tokens_too() -> None:
    prompt = parse_request(framed("0a01651203120107"), EMBED, HEADERS).prompt
    assert isinstance(prompt, TokenPrompt)
    assert list(prompt.token_ids) == [7]


def test_of_two_inputs_the_last_counts() -> None:
    both = framed("1203120107" + "1a0548656c6c6f")
    assert parse_request(both, GENERATE, HEADERS).prompt == TextPrompt("Hello")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (framed("12031201013a03320161"), "multimodal"),
        (framed("12031201015200"), "multimodal"),
        (framed("12031201015a00"), "multimodal"),
        (framed("1a01612203d80105"), "truncated_prompt"),
        (framed("1203120107", flags=1), "unknown_encoding"),
        (framed("0a0172"), "prompt_shape"),  # no input
        (framed("1201"), "prompt_shape"),  # no message
        (framed("1a01ff"), "prompt_shape"),  # no UTF-8
        (TOKENIZED[:-1], "prompt_shape"),
        (TOKENIZED * 2, "prompt_shape"),
        (b"{}", "prompt_shape"),
        (b"\0" * ((5 << 20) + 1), "body_size"),
    ],
)
def test_what_is_not_known_exactly_is_routed_by_load(body: bytes, reason: str) -> None:
    request = parse_request(body, GENERATE, HEADERS)
    assert (request.prompt, request.no_prompt) == (None, reason)


def test_more_ids_than_the_loop_can_wait_for_are_not_copied() -> None:
    ids = b"\x01" * 300_001
    inner = b"\x12" + bytes([0xE1, 0xA7, 0x12]) + ids
    message = b"\x12" + bytes([0xE5, 0xA7, 0x12]) + inner
    request = parse_request(b"\0" + len(message).to_bytes(4) + message, GENERATE, HEADERS)
    assert (request.prompt, request.no_prompt) == (None, "body_density")


def test_other_methods_of_the_service_are_routed_by_load() -> None:
    request = parse_request(framed("0a0172"), "/vllm.grpc.engine.VllmEngine/Abort", HEADERS)
    assert (request.kind, request.no_prompt) == (RequestKind.OTHER, "path")
