"""The order of an ext_proc conversation, as tables.

A request and its response are two machines. They meet in BYPASS: the gateway answers before we decided.
A step that a phase does not list is a protocol error. Constants only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class RequestPhase(enum.Enum):
    __hash__ = object.__hash__  # keys of the tables below; Enum's own runs in Python

    START = "start"  # nothing read
    COLLECTING = "collecting the body"
    DECIDING = "deciding"  # NeedDecision is out
    FORWARDED = "forwarded"  # the decision is with the gateway
    BYPASSED = "answered by the gateway itself"  # before we had decided
    REFUSED = "refused"
    ENDED = "ended"


class ResponsePhase(enum.Enum):
    __hash__ = object.__hash__  # keys of the tables below; Enum's own runs in Python

    WAITING = "waiting"
    BODY = "in the body"
    DONE = "done"


class Step(enum.Enum):
    """What an event means for the order of things."""

    __hash__ = object.__hash__

    HEADERS = "headers"
    HEADERS_ALONE = "headers that are also the whole request"
    BODY = "a body part"
    BODY_END = "the end of the body"
    TRAILERS = "trailers"
    DECIDED = "a decision"
    REFUSE = "a refusal"
    BYPASS = "an answer before the decision"
    END = "the end of the stream"


_R, _P, _S = RequestPhase, ResponsePhase, Step

REQUEST_TRANSITIONS: Final[Mapping[RequestPhase, Mapping[Step, RequestPhase]]] = {
    _R.START: {
        _S.HEADERS: _R.COLLECTING,
        _S.HEADERS_ALONE: _R.DECIDING,
        _S.BYPASS: _R.BYPASSED,  # a filter in front of ours answered: we see the response only
        _S.END: _R.ENDED,
    },
    _R.COLLECTING: {
        _S.BODY: _R.COLLECTING,
        _S.BODY_END: _R.DECIDING,
        _S.TRAILERS: _R.DECIDING,  # trailers end a body, too
        _S.REFUSE: _R.REFUSED,
        _S.BYPASS: _R.BYPASSED,
        _S.END: _R.ENDED,
    },
    _R.DECIDING: {
        _S.BODY: _R.DECIDING,  # after the final message: ignored, never parsed again
        _S.BODY_END: _R.DECIDING,
        _S.TRAILERS: _R.DECIDING,
        _S.DECIDED: _R.FORWARDED,
        _S.REFUSE: _R.REFUSED,
        _S.BYPASS: _R.BYPASSED,
        _S.END: _R.ENDED,
    },
    _R.FORWARDED: {
        _S.BODY: _R.FORWARDED,
        _S.BODY_END: _R.FORWARDED,
        _S.TRAILERS: _R.FORWARDED,
        _S.BYPASS: _R.FORWARDED,  # the ordinary answer
        _S.END: _R.ENDED,
    },
    _R.BYPASSED: dict.fromkeys(
        (_S.BODY, _S.BODY_END, _S.TRAILERS, _S.DECIDED, _S.REFUSE, _S.BYPASS), _R.BYPASSED
    )
    | {_S.END: _R.ENDED},
    _R.REFUSED: dict.fromkeys((_S.BODY, _S.BODY_END, _S.TRAILERS, _S.BYPASS), _R.REFUSED)
    | {_S.END: _R.ENDED},
    _R.ENDED: dict.fromkeys(_S, _R.ENDED),
}

RESPONSE_TRANSITIONS: Final[Mapping[ResponsePhase, Mapping[Step, ResponsePhase]]] = {
    _P.WAITING: {
        _S.HEADERS: _P.BODY,
        _S.HEADERS_ALONE: _P.DONE,
        _S.BODY: _P.BODY,  # response_header_mode SKIP
        _S.BODY_END: _P.DONE,
        _S.TRAILERS: _P.DONE,
    },
    _P.BODY: {
        _S.BODY: _P.BODY,
        _S.BODY_END: _P.DONE,
        _S.TRAILERS: _P.DONE,
    },
    _P.DONE: {
        _S.BODY: _P.DONE,  # ignored like everything after an end
        _S.BODY_END: _P.DONE,
        _S.TRAILERS: _P.DONE,
    },
}
