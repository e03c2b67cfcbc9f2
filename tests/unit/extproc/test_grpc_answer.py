"""Answers of vLLM's gRPC API as they pass. Hex texts were made by the classes of smg-grpc-proto 0.4.28."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.extproc import events as ev
from epp.extproc.answer import Answer, Output
from epp.extproc.grpc_answer import MAX_FRAME_BYTES, GrpcAnswer
from epp.extproc.usage import TokenUsage

CHUNK = "0a0a0a020506100a18022008"
COMPLETE = "12150a03050607120473746f70180a2003280862027b7d"
EMBEDDING = "0a080000003f0000803e10091802"


def framed(message: str, flags: int = 0) -> bytes:
    data = bytes.fromhex(message)
    return bytes([flags]) + len(data).to_bytes(4) + data


def grpc_headers(*more: tuple[str, str]) -> ev.ResponseHeaders:
    return ev.ResponseHeaders(
        ev.Headers.of((":status", "200"), ("content-type", "application/grpc+proto"), *more)
    )


@pytest.mark.parametrize(
    ("message", "usage"),
    [
        (CHUNK, TokenUsage(10, 2, 8)),
        (COMPLETE, TokenUsage(10, 3, 8)),
        (EMBEDDING, TokenUsage(9, 0, 0)),
        ("0a040a020506", TokenUsage()),  # a chunk that counts nothing
        ("", TokenUsage()),
    ],
)
def test_counts_are_read(message: str, usage: TokenUsage) -> None:
    answer = GrpcAnswer()
    assert answer.feed(framed(message)) == bool(message)
    assert answer.usage == usage


@pytest.mark.parametrize("seed", range(20))
def test_cuts_make_no_difference(seed: int) -> None:
    rng = random.Random(seed)
    data = framed(CHUNK) + framed(CHUNK) + framed(COMPLETE)
    cuts = sorted(rng.sample(range(1, len(data)), 5))
    answer, found = GrpcAnswer(), 0
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        found += answer.feed(data[start:end])
    assert answer.usage == TokenUsage(10, 3, 8)
    assert 1 <= found <= 3


def test_the_first_message_is_the_first_token_and_the_next_are_more() -> None:
    answer = Answer()
    answer.begin(grpc_headers())
    frame = framed(CHUNK)
    assert answer.feed(frame[:7]) is Output.NONE
    assert answer.feed(frame[7:]) is Output.FIRST
    assert answer.feed(framed(CHUNK)) is Output.MORE
    assert answer.feed(framed(COMPLETE)) is Output.MORE
    outcome = answer.outcome(completed=True)
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (10, 3, 8)
    assert outcome.streamed


def test_long_frames_pass_unread_and_the_next_one_is_read() -> None:
    answer = GrpcAnswer()
    size = MAX_FRAME_BYTES + 1
    assert answer.feed(b"\0" + size.to_bytes(4) + b"x" * 100)
    assert not answer.feed(b"x" * (size - 100))
    assert answer.feed(framed(COMPLETE))
    assert answer.usage == TokenUsage(10, 3, 8)


def test_compressed_messages_are_output_without_counts() -> None:
    answer = GrpcAnswer()
    assert answer.feed(framed(CHUNK, flags=1))
    assert answer.usage == TokenUsage()


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_no_bytes_raise(pieces: list[bytes]) -> None:
    answer = GrpcAnswer()
    for piece in pieces:
        answer.feed(piece)
        answer.feed(framed(piece.hex()))
