"""Plain values of the ext_proc conversation: what the gateway says, and what it is answered.

They exist so that `session` can be driven, tested and replayed without protobuf, gRPC or a loop. They
carry bytes and header values only; nothing here interprets a body.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from epp.core.types import Outcome


class Direction(enum.Enum):
    """Which half of the HTTP exchange a message belongs to."""

    REQUEST = "request"
    RESPONSE = "response"


class BodyMode(enum.IntEnum):
    """How the gateway sends a body. Numbers: envoy ext_proc v3 `ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


@dataclass(frozen=True, slots=True)
class BodyModes:
    """Announced on a stream's first message; gateways that announce nothing use the protocol's own."""

    request: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    response: BodyMode = BodyMode.FULL_DUPLEX_STREAMED


@dataclass(frozen=True, slots=True)
class Headers:
    """Header fields in the order they came, every value kept; look-ups ignore case."""

    fields: tuple[tuple[str, str], ...] = ()  # names in lower case
    _first: Mapping[str, str] = field(init=False, repr=False, compare=False)  # asked for 20 times a request

    def __post_init__(self) -> None:
        object.__setattr__(self, "_first", dict(reversed(self.fields)))

    @classmethod
    def of(cls, *fields: tuple[str, str]) -> Headers:
        return cls(tuple((name.lower(), value) for name, value in fields))

    def first(self, name: str) -> str | None:
        return self._first.get(name.lower())

    def all(self, name: str) -> tuple[str, ...]:
        wanted = name.lower()
        if wanted not in self._first:
            return ()
        return tuple(value for key, value in self.fields if key == wanted)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._first

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.fields)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """All a decision may read besides the body. `request_id` is the client's, or one made for it.
    `subset`: the `ip` or `ip:port` values the gateway allows; None: it said nothing."""

    headers: Headers
    method: str
    path: str
    request_id: str
    subset: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """The handler's answer. `destination`: `ip:port[,ip:port]`. `body` None: forwarded as it came.
    `token` is the handler's own name for this decision; it comes back untouched. `rename_model`: what the
    engine will call its model, and what the client is to read. `served_header`: a response header that is to
    say who served."""

    destination: str
    set_headers: Mapping[str, str] = field(default_factory=dict)
    remove_headers: Sequence[str] = ()
    response_headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    token: object = None
    rename_model: tuple[str, str] | None = None
    served_header: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of our own instead of an upstream's. `message` is shown to the client."""

    status: int
    reason: str
    message: str


# ---- what the gateway says -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    head: RequestHead
    end_of_stream: bool = False
    modes: BodyModes | None = None  # said on a stream's first message only, if at all


@dataclass(frozen=True, slots=True)
class RequestBody:
    body: bytes
    end_of_stream: bool = False
    subset: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    subset: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    headers: Headers
    end_of_stream: bool = False
    served_by: str | None = None  # upstream address as the gateway reports it
    modes: BodyModes | None = None


@dataclass(frozen=True, slots=True)
class ResponseBody:
    body: bytes
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    pass


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The gateway closed the stream: by half-close, cancel or a lost connection, all the same."""


Event = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | StreamEnded
)

# ---- what is to be done --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NeedDecision:
    """Ask the handler, then call `Session.decided` or `Session.refused`. `body` None: there is none."""

    head: RequestHead
    body: bytes | None


@dataclass(frozen=True, slots=True)
class HeaderEdit:
    """Changes of one header block; set wins over remove, and replaces every earlier value."""

    set: Mapping[str, str] = field(default_factory=dict)
    remove: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ContinueRequestHeaders:
    """BUFFERED only: let the gateway go on to the body; the decision follows with it."""


@dataclass(frozen=True, slots=True)
class SendRequestHeaders:
    destination: str
    edit: HeaderEdit


@dataclass(frozen=True, slots=True)
class SendBufferedRequest:
    """BUFFERED only: headers and body in one answer. `body` None: unchanged."""

    destination: str
    edit: HeaderEdit
    body: bytes | None


@dataclass(frozen=True, slots=True)
class SendBodyPiece:
    """FULL_DUPLEX_STREAMED only: the next piece of the body that goes on."""

    direction: Direction
    body: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class KeepBody:
    """Every other mode: this body message goes on unchanged."""

    direction: Direction


@dataclass(frozen=True, slots=True)
class ReplaceBody:
    """Every other mode: this body message of an answer goes on as `body`. `whole`: it is all of the answer,
    so that its length changes with it."""

    body: bytes
    whole: bool


@dataclass(frozen=True, slots=True)
class SendTrailers:
    direction: Direction


@dataclass(frozen=True, slots=True)
class SendResponseHeaders:
    edit: HeaderEdit


@dataclass(frozen=True, slots=True)
class SendImmediate:
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first byte of a good answer that carries output has just passed. At most once."""


@dataclass(frozen=True, slots=True)
class MoreTokens:
    """A later piece of a streamed answer that carries output has just passed."""


class Degradation(enum.Enum):
    """What the gateway's configuration keeps from us. The value is the sentence for the log."""

    NO_REQUEST_BODY = (
        "the gateway sends no request bodies (request_body_mode NONE): requests are routed by load only"
    )
    NO_RESPONSE_BODY = (
        "the gateway sent no response body (response_body_mode NONE, or it left early): "
        "no token usage and no time to first token for such requests"
    )
    ENCODED_RESPONSE = (
        "answers are compressed before they reach the gateway (content-encoding): no token usage for such "
        "requests; have accept-encoding removed from requests"
    )


@dataclass(frozen=True, slots=True)
class Degraded:
    kind: Degradation


@dataclass(frozen=True, slots=True)
class Finished:
    """The conversation is over. Exactly once. Times are the caller's: `ttft_s` is never set here."""

    outcome: Outcome


Action = (
    NeedDecision
    | ContinueRequestHeaders
    | SendRequestHeaders
    | SendBufferedRequest
    | SendBodyPiece
    | KeepBody
    | ReplaceBody
    | SendTrailers
    | SendResponseHeaders
    | SendImmediate
    | FirstToken
    | MoreTokens
    | Degraded
    | Finished
)
