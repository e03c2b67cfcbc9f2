"""S-A12: compressed bodies are decoded for the decision only, within bounds; bombs cost nothing much."""

from __future__ import annotations

import contextlib
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.request import decode
from epp.request.decode import MAX_DECODED_BYTES, content_encodings, decode_body
from epp.request.parse import INLINE_BYTES, TextPrompt, blocks_for_long, parse_request
from epp.request.prompts import NoPrompt

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": "Hello, compressed world. " * 40}).encode()
PROMPT = TextPrompt("Hello, compressed world. " * 40)


def parse(body: bytes, encoding: str) -> Any:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return parse_request(body, COMPLETIONS, headers)


def zstd(body: bytes, **options: Any) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    compressed: bytes = zstandard.ZstdCompressor(**options).compress(body)
    return compressed


def gzip_bomb(expanded_bytes: int) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = bytes(1 << 20)
    parts = [compressor.compress(piece) for _ in range(expanded_bytes >> 20)]
    return b"".join(parts) + compressor.flush()


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", " gzip ", "identity, gzip"])
def test_s_a12_gzip(encoding: str) -> None:
    request = parse(gzip.compress(BODY), encoding)
    assert request.prompt == PROMPT
    assert request.size_bytes == len(gzip.compress(BODY))  # what is forwarded


def test_s_a12_several_gzip_members() -> None:
    body = gzip.compress(BODY[:100]) + gzip.compress(b"") + gzip.compress(BODY[100:])
    assert parse(body, "gzip").prompt == PROMPT


def test_s_a12_zstd() -> None:
    assert parse(zstd(BODY), "zstd").prompt == PROMPT
    assert parse(zstd(BODY[:50]) + zstd(BODY[50:]), "zstd").prompt == PROMPT


def test_s_a12_stacked() -> None:
    assert parse(gzip.compress(gzip.compress(BODY)), "gzip, gzip").prompt == PROMPT
    assert parse(gzip.compress(zstd(BODY)), "zstd, gzip").prompt == PROMPT
    assert parse(gzip.compress(zstd(BODY)), "gzip, zstd").no_prompt == "broken_encoding"
    assert parse(BODY, "gzip, gzip, gzip").no_prompt == "unknown_encoding"


@pytest.mark.parametrize("encoding", ["br", "deflate", "compress", "gzip, br", "x" * 500, "gzip;q=1"])
def test_s_a12_other_encodings_are_routed_by_load(encoding: str) -> None:
    assert parse(gzip.compress(BODY), encoding).no_prompt == "unknown_encoding"


@pytest.mark.parametrize("encoding", ["", "identity", " , "])
def test_no_encoding(encoding: str) -> None:
    assert content_encodings(encoding) == ()
    assert parse(BODY, encoding).prompt == PROMPT


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_s_a12_a_broken_stream_is_routed_by_load(encoding: str) -> None:
    whole = gzip.compress(BODY) if encoding == "gzip" else zstd(BODY)
    flipped = bytes([*whole[:-6], whole[-6] ^ 0xFF, *whole[-5:]])
    for body in (whole[:-9], whole[:3], BODY, whole + b"rest", flipped[:40]):
        request = parse(body, encoding)
        assert (request.prompt, request.no_prompt) == (None, "broken_encoding")


def test_broken_json_inside_is_left_to_the_engine() -> None:
    """An engine may read the encoding in another way: no 400 of ours."""
    assert parse(gzip.compress(b'{"model": "m",'), "gzip").no_prompt == "broken_encoding"


def test_s_a12_a_gzip_bomb_is_given_up_early() -> None:
    bomb = gzip_bomb(1 << 28)
    assert len(bomb) < 300_000
    tracemalloc.start()
    try:
        request = parse(bomb, "gzip")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (request.prompt, request.no_prompt) == (None, "decoded_size")
    assert peak_bytes < 4 * MAX_DECODED_BYTES


def test_s_a12_a_small_bomb_is_given_up_by_its_ratio() -> None:
    bomb = gzip.compress(b'{"model": "m", "prompt": "' + b"x" * (2 << 20) + b'"}')
    assert len(bomb) * decode.MAX_RATIO < 2 << 20
    assert parse(bomb, "gzip").no_prompt == "decoded_size"


def test_s_a12_a_stacked_bomb_is_given_up() -> None:
    assert parse(gzip.compress(gzip_bomb(1 << 26)), "gzip, gzip").no_prompt == "decoded_size"


def test_s_a12_zstd_bombs() -> None:
    assert parse(zstd(bytes(1 << 26)), "zstd").no_prompt == "decoded_size"
    zstandard = pytest.importorskip("zstandard")
    for window_log, prompt in ((20, PROMPT), (27, None)):  # memory that the decoder would have to hold
        options = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log)
        compressor = zstandard.ZstdCompressor(compression_params=options).compressobj()
        assert parse(compressor.compress(BODY) + compressor.flush(), "zstd").prompt == prompt


def test_without_the_zstandard_package_zstd_is_routed_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(decode._DECODERS, "zstd", raising=False)
    assert parse(b"\x28\xb5\x2f\xfd", "zstd").no_prompt == "unknown_encoding"


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 300), st.integers(0, 255))
def test_a_changed_byte_is_no_fault(data: bytes, at: int, byte: int) -> None:
    body = bytearray(gzip.compress(data, mtime=0))
    body[at % len(body)] = byte
    with contextlib.suppress(NoPrompt):
        decode_body(bytes(body), ("gzip",))


def test_paths_without_prompts_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_DECODERS", {"gzip": pytest.fail})
    headers = {"content-encoding": "gzip"}
    assert parse_request(gzip.compress(BODY), "/v1/embeddings", headers).no_prompt == "path"


def test_large_and_compressed_bodies_leave_the_loop() -> None:
    assert not blocks_for_long(bytes(2000), {})
    assert blocks_for_long(bytes(INLINE_BYTES + 1), {})
    assert blocks_for_long(bytes(2000), {"content-encoding": "gzip"})
    assert not blocks_for_long(b"", {"content-encoding": "gzip"})


# 32 MB of these kept a decoder that copied all that was left for each of them busy for hours
EMPTY_MEMBER = gzip.compress(b"", mtime=0)


def test_many_small_gzip_members_are_read() -> None:
    members = b"".join(gzip.compress(BODY[at : at + 1], mtime=0) for at in range(len(BODY)))
    assert parse(members + EMPTY_MEMBER * 100, "gzip").prompt == PROMPT


def test_countless_gzip_members_are_given_up() -> None:
    body = EMPTY_MEMBER * (decode.MAX_GZIP_MEMBERS + 1)
    assert parse(body, "gzip").no_prompt == "unknown_encoding"


def test_the_work_for_gzip_members_follows_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to the decoder again and again is a piece of the body, never all that is left."""
    handed = 0
    real = zlib.decompressobj

    class Counted:
        def __init__(self, wbits: int) -> None:
            self._member = real(wbits)

        def decompress(self, data: bytes, limit: int) -> bytes:
            nonlocal handed
            handed += len(data)
            return self._member.decompress(data, limit)

        def __getattr__(self, name: str) -> object:
            return getattr(self._member, name)

    monkeypatch.setattr(zlib, "decompressobj", Counted)
    body = EMPTY_MEMBER * 3000 + gzip.compress(BODY)
    assert parse(body, "gzip").prompt == PROMPT
    assert handed < 3001 * 2 * decode._INPUT_BYTES


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_what_is_larger_than_anything_decoded_is_not_decoded(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setitem(decode._DECODERS, encoding, called.append)
    assert parse(bytes(MAX_DECODED_BYTES + 1), encoding).no_prompt == "decoded_size"
    assert not called
