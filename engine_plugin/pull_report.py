"""`PullFinished`: what an engine says of a pull that has ended, on its own PUB socket (`reports_port`).

One message a pull that a client's request named a source for, whatever became of it; its `id` is the
`kv_request_id`, which is the picker's decision id. Two frames: topic, msgpack map. This is the codec
only: unknown fields are ignored, so that a newer engine can say more.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

TOPIC: Final = b"pull"
MAX_REPORT_BYTES: Final = 2048
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Text = Annotated[str, msgspec.Meta(max_length=128)]


class PullFinished(msgspec.Struct, frozen=True):
    """`asked_tokens`: of the source; 0 where it was not even asked. `reason`: "ok", or why less came
    than was asked. `ms`: from the start of the pull to its end."""

    id: _Text
    source: _Text  # p2p `ip:port`
    asked_tokens: _Count
    received_tokens: _Count
    received_bytes: _Count
    reason: _Text
    ms: Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class ReportError(ValueError):
    """These frames are no report."""


_decoder = msgspec.msgpack.Decoder(PullFinished)
_encoder = msgspec.msgpack.Encoder()


def encode(report: PullFinished) -> list[bytes]:
    return [TOPIC, _encoder.encode(report)]


def decode(frames: list[bytes]) -> PullFinished:
    """Raises ReportError for anything that is no report."""
    if len(frames) != 2 or frames[0] != TOPIC or len(frames[1]) > MAX_REPORT_BYTES:
        raise ReportError("not the frames of a report")
    try:
        return _decoder.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError("malformed report") from error
