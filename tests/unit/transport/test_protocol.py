"""The control codec: what is encoded comes back, and no other bytes do anything but FrameError."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_plugin import protocol
from engine_plugin.identity import PeerIdentity
from engine_plugin.protocol import FrameError

WHO = PeerIdentity("i", 0, "m", "r", 16, 4096, "bf16", "hnd", 1, "sha256", "ff")
FROM_CLIENT: list[Any] = [
    protocol.Hello("kvpull", 1, WHO),
    protocol.MoverInfo(1, "i-0#1", b"metadata", (1 << 64) - 1, 64),
    protocol.Lookup(7, "req", [b"h" * 32], 10),
    protocol.Move(8, "t", "l", 1, [3, 4], [1, (1 << 64) - 1]),
    protocol.Cancel(8),
    protocol.Release("l"),
    protocol.Ping(),
]
FROM_SERVER: list[Any] = [
    protocol.Accepted(),
    protocol.Refused("identity", "dtype"),
    protocol.Found(7, "l", [1], [(1 << 64) - 1], 1000),
    protocol.Declined(7, "miss"),
    protocol.Progress(8, 3),
    protocol.Ended(8, "done", True, 8192),
    protocol.Pong(),
]


def payload(message: Any) -> bytes:
    frame = protocol.encode(message)
    assert protocol.payload_bytes(frame[:4], 1 << 20) == len(frame) - 4
    return frame[4:]


@pytest.mark.parametrize("message", FROM_CLIENT)
def test_client_messages_come_back(message: Any) -> None:
    assert protocol.decode_client(payload(message)) == message


@pytest.mark.parametrize("message", FROM_SERVER)
def test_server_messages_come_back(message: Any) -> None:
    assert protocol.decode_server(payload(message)) == message


@pytest.mark.parametrize("message", FROM_SERVER)
def test_a_client_may_not_say_what_a_server_says(message: Any) -> None:
    with pytest.raises(FrameError):
        protocol.decode_client(payload(message))


@pytest.mark.parametrize("message", FROM_CLIENT[1:])
def test_a_server_may_not_say_what_a_client_says(message: Any) -> None:
    with pytest.raises(FrameError):
        protocol.decode_server(payload(message))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_frame_error(junk: bytes) -> None:
    for decode in (protocol.decode_client, protocol.decode_server):
        try:
            decode(junk)
        except FrameError:
            continue


@given(st.sampled_from(FROM_CLIENT), st.data())
def test_truncated_and_altered_frames_raise_nothing_else(message: Any, data: st.DataObject) -> None:
    whole = bytearray(payload(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(FrameError):
        protocol.decode_client(bytes(whole[:at]))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        protocol.decode_client(bytes(whole))
    except FrameError:
        return


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "lookup", "id": -1, "kv_request_id": "r", "hashes": []},
        {"type": "lookup", "id": 1, "kv_request_id": "r" * 257, "hashes": []},
        {"type": "lookup", "id": 1, "kv_request_id": "r", "hashes": [b""]},
        {"type": "lookup", "id": 1, "kv_request_id": "r", "hashes": [b"x" * 65]},
        {"type": "hello", "magic": "kvpull", "protocol": 2, "identity": "me"},
        {"type": "mover", "epoch": 1, "agent": "", "metadata": b"x", "base_address": 0, "slots": 1},
        {"type": "nonsense"},
        {"id": 1},
    ],
)
def test_out_of_range_fields_are_frame_errors(fields: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        protocol.decode_client(msgspec.msgpack.encode(fields))


def test_a_newer_peers_extra_fields_are_ignored() -> None:
    raw = msgspec.msgpack.encode({"type": "cancel", "id": 3, "why": "newer"})
    assert protocol.decode_client(raw) == protocol.Cancel(3)


@pytest.mark.parametrize("header", [b"\0\0\0\0", b"GET ", b"\xff\xff\xff\xff", b"\0\0\x10\x01"])
def test_frames_beyond_the_limit_are_refused_by_their_header(header: bytes) -> None:
    with pytest.raises(FrameError, match="are allowed"):
        protocol.payload_bytes(header, 4096)
