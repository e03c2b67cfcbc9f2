"""KV-event messages of an engine cut into their parts: sequence and payload. Pure.

Live `[topic, sequence, payload]`; replayed ones also without the topic (case S-C03) and with an empty
delimiter first. The topic is never used: the connection says who sent it. Nothing here looks at a
payload: one that is too large is an unreadable batch (the decoders say so), which leaves a known hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = b"\xff" * SEQUENCE_BYTES


class CodecError(ValueError):
    """A message that is no KV-event batch. `reason` is a stable label; the text never shows data."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason  # "frames" | "sequence" | "size" | "payload" | "event"


@dataclass(frozen=True, slots=True)
class Message:
    """A message cut into its parts; `seq` is None for the end marker of a replay."""

    seq: int | None
    payload: bytes


def split_live(frames: Sequence[bytes]) -> Message:
    """Parts of a published message: two frames (no topic) or three.

    Raises:
        CodecError: another number of frames, a sequence that is none.
    """
    if not 2 <= len(frames) <= 3:
        raise CodecError("frames", f"{len(frames)} frames instead of topic, sequence, payload")
    message = _split(frames)
    if message.seq is None:
        raise CodecError("sequence", "end marker of a replay in the live stream")
    return message


def split_replayed(frames: Sequence[bytes]) -> Message:
    """Parts of an answer on the replay socket: as a live message, with or without a delimiter.

    Raises:
        CodecError: see `split_live`.
    """
    if not 2 <= len(frames) <= 4:
        raise CodecError("frames", f"{len(frames)} frames in an answer of the replay socket")
    return _split(frames)


def replay_request(from_seq: int) -> list[bytes]:
    """Frames that ask a replay socket for everything from `from_seq` on."""
    return [b"", from_seq.to_bytes(SEQUENCE_BYTES, "big")]


def is_end_of_replay(frames: Sequence[bytes]) -> bool:
    """Cheap test for the receiving thread."""
    return len(frames) >= 2 and frames[-2] == END_OF_REPLAY


def _split(frames: Sequence[bytes]) -> Message:
    sequence, payload = frames[-2], frames[-1]
    if len(sequence) != SEQUENCE_BYTES:
        raise CodecError("sequence", f"sequence frame of {len(sequence)} bytes instead of {SEQUENCE_BYTES}")
    if sequence == END_OF_REPLAY:
        return Message(None, b"")
    seq = int.from_bytes(sequence, "big")
    if seq >> 63:
        raise CodecError("sequence", "sequence is negative")
    return Message(seq, payload)
