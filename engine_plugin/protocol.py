"""Control messages between two engines' transports: versioned, length-prefixed msgpack. Pure.

A frame is a 4-byte big-endian length and one msgpack map with a `type` tag. The *client* is the
consumer, which dials; the *server* is the producer, which never dials back. Each side decodes only
what the other may send, so a message out of place is a bad frame like any other.

    client                                server
    TLS              <->                        each proves to hold the pool's key (`control.pool_tls`)
    Hello            ->                         identity
                     <-  Hello                  the same
                     <-  Accepted | Refused
    MoverInfo        ->                         where to write; again whenever the mover is replaced
    Lookup           ->  <-  Found | Declined   blocks held and leased, or why not
    Move             ->  <-  Progress* Ended    or Declined: never started
    Prefetch         ->  <-  Prefetched | Declined   the *server* shall pull, from a third one
    Cancel, Release, Ping -> <- Pong

Nothing about memory is in any message before `Accepted`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec

from engine_plugin import wire
from engine_plugin.identity import PeerIdentity

VERSION: Final = wire.P2P_PROTOCOL_VERSION
MAGIC: Final = "kvpull"
HEADER_BYTES: Final = 4
MAX_BLOCKS: Final = 65_536  # of one look-up or move
MAX_TOKENS: Final = 1 << 20  # of one order to pull
HANDSHAKE_BYTES: Final = 4096  # largest frame before `Accepted`

Id = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Word = Annotated[int, msgspec.Meta(ge=0)]  # unsigned 64 bits: addresses, checksums, generations
Token = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Detail = Annotated[str, msgspec.Meta(max_length=256)]
BlockHash = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Metadata = Annotated[bytes, msgspec.Meta(min_length=1, max_length=1 << 16)]

Tokens = Annotated[list[Count], msgspec.Meta(max_length=MAX_TOKENS)]
Hashes = Annotated[list[BlockHash], msgspec.Meta(max_length=MAX_BLOCKS)]
Slots = Annotated[list[Count], msgspec.Meta(max_length=MAX_BLOCKS)]
Words = Annotated[list[Word], msgspec.Meta(max_length=MAX_BLOCKS)]

Role = Literal["peer", "picker"]
RefusalReason = Literal["auth", "identity", "protocol", "limit"]
DeclineReason = Literal["miss", "limit", "stale", "mover_down", "timeout", "failed", "unsupported"]
EndReason = Literal["done", "cancelled", "failed", "mover_down"]


class FrameError(ValueError):
    """Bytes that are not a frame of this protocol; closes the connection they came on."""


class Message(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of every message."""


class Hello(Message, frozen=True, tag="hello"):
    """First frame of either side. A `picker` has no blocks, so nothing of its identity but the instance is
    compared; it may order pulls and nothing else, and it has to prove that it holds the pool's key."""

    magic: Literal["kvpull"]
    protocol: int
    identity: PeerIdentity
    role: Role = "peer"


class Accepted(Message, frozen=True, tag="accepted"):
    """The server is satisfied; requests may follow."""


class Refused(Message, frozen=True, tag="refused"):
    """The server ends the handshake; `detail` names the identity field or the limit."""

    reason: RefusalReason
    detail: Detail = ""


class MoverInfo(Message, frozen=True, tag="mover"):
    """The client's mover: what the server's mover needs to write into its tier."""

    epoch: Id
    agent: Token
    metadata: Metadata
    base_address: Word
    slots: Count


class Lookup(Message, frozen=True, tag="lookup"):
    """Which contiguous prefix of `hashes` do you hold? Wait up to `wait_ms` for an announced supply, and
    before that up to `patience_ms` for this peer's turn."""

    id: Id
    kv_request_id: Annotated[str, msgspec.Meta(max_length=256)]
    hashes: Hashes
    wait_ms: Count = 0
    patience_ms: Count = 0


class Found(Message, frozen=True, tag="found"):
    """A lease over the first `len(generations)` blocks asked, for `lease_ms`. No checksums: the server makes
    none, and a client that wants them refuses the offer."""

    id: Id
    lease_id: Token
    generations: Words
    checksums: Words
    lease_ms: Count


class Declined(Message, frozen=True, tag="declined"):
    """The look-up gave nothing, or the move never started: no byte was or will be written."""

    id: Id
    reason: DeclineReason
    detail: Detail = ""


class Move(Message, frozen=True, tag="move"):
    """Write the lease's first `len(slots)` blocks into these slots of mover `epoch`; single use. It may wait
    up to `patience_ms` for this peer's turn, and then answers with `Progress` of no chunk."""

    id: Id
    tag: Token
    lease_id: Token
    epoch: Id
    slots: Slots
    generations: Words
    patience_ms: Count = 0


class Progress(Message, frozen=True, tag="progress"):
    """`chunks` written so far."""

    id: Id
    chunks: Count


class Ended(Message, frozen=True, tag="ended"):
    """The move is over at the server. `settled`: no write of it can arrive any more."""

    id: Id
    reason: EndReason
    settled: bool
    bytes: Count
    detail: Detail = ""


class Cancel(Message, frozen=True, tag="cancel"):
    """Give up the look-up or move `id`; a started move is still answered with `Ended`."""

    id: Id


class Release(Message, frozen=True, tag="release"):
    """Give a lease back; unknown ones are ignored."""

    lease_id: Token


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Pull blocks from the source into your own tier now; no request waits for it. The blocks are `hashes`,
    or, where those are empty, the whole blocks of `tokens`, which the engine names as it names a
    prompt's."""

    id: Id
    kv_request_id: Annotated[str, msgspec.Meta(max_length=256)]
    source_host: Token
    source_port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    hashes: Hashes
    deadline_ms: Count
    tokens: Tokens = []
    cache_salt: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    lora_name: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class Prefetched(Message, frozen=True, tag="prefetched"):
    """How many of the leading blocks are there now; `reason` is a `PullReason`, or `ok`."""

    id: Id
    blocks: Count
    bytes: Count
    reason: Detail = "ok"


class Ping(Message, frozen=True, tag="ping"):
    """Are you there?"""


class Pong(Message, frozen=True, tag="pong"):
    """Yes."""


ClientMessage = Hello | MoverInfo | Lookup | Move | Prefetch | Cancel | Release | Ping
ServerMessage = Hello | Accepted | Refused | Found | Declined | Progress | Ended | Prefetched | Pong

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_from_server: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


def encode(message: msgspec.Struct) -> bytes:
    """One whole frame."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_bytes(header: bytes, limit_bytes: int) -> int:
    """Length that a frame header announces.

    Raises:
        FrameError: empty, or longer than `limit_bytes` (an HTTP request line lands here too).
    """
    length = int.from_bytes(header, "big")
    if not 0 < length <= limit_bytes:
        raise FrameError(f"frame of {length} bytes; 1 to {limit_bytes} are allowed here")
    return length


def decode_client(payload: bytes) -> ClientMessage:
    """A message from the consumer. Raises FrameError."""
    return _decode(_from_client, payload)


def decode_server(payload: bytes) -> ServerMessage:
    """A message from the producer. Raises FrameError."""
    return _decode(_from_server, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise FrameError(f"not a message of this protocol: {exc}") from exc
