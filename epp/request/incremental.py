"""Tokens of a text at a cost that follows what is new in it: cut where it is exact, remember the parts.

Where no cut is safe for the tokenizer the text is one segment: encoded whole, and remembered whole.
Everything here blocks and is meant for a thread; between segments the interpreter is free for others.
It must not log or keep texts.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from epp.core.hashing import TOKEN_BYTES
from epp.request.chat import Unrenderable
from epp.request.cut_rules import CutRules
from epp.request.segments import SEGMENT_CHARS, Segmenter
from epp.request.token_cache import TokenCache

LONG_SEGMENT_CHARS: Final = 64 << 10  # tens of milliseconds in one call that nothing can interrupt
# Its ids come as one list, which holds the interpreter for about 50 ns each, and so does the end of the list
# and of the encoding behind it: 5 ms. More than that is not encoded at all.
MAX_SEGMENT_TOKENS: Final = 100_000
MAX_SEGMENT_CHARS: Final = 1 << 20  # of whatever tokenizer
_SAMPLES: Final = 16
_SAMPLE_CHARS: Final = 256
_PROBES: Final = ("a", "0 z", ". B")


class TooLong(Unrenderable):
    """A text without a place to cut, of more tokens than may be read at once."""

    def __init__(self) -> None:
        super().__init__("long_text")


class TextEncoder(Protocol):
    """Token ids of a text, whole and without looking back: `LocalTokenizer`."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


@dataclass(slots=True)
class EncoderCounters:
    """Plain values. Threads add to them without a lock: a count may get lost, none is invented."""

    reused_tokens: int = 0
    encoded_tokens: int = 0


class IncrementalEncoder:
    """The ids of `encoder.encode`, as native uint32. Thread-safe."""

    def __init__(
        self,
        encoder: TextEncoder,
        rules: CutRules,
        cache: TokenCache,
        *,
        segment_chars: int = SEGMENT_CHARS,
    ) -> None:
        self._encoder = encoder
        self._segmenter = Segmenter(rules, segment_chars=segment_chars)
        self._cache = cache
        self._frame = _special_frame(encoder) if rules.any else None
        self.counters: Final = EncoderCounters()

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        """Token ids of `text`, of type code "I".

        Raises:
            UnicodeEncodeError: lone surrogates; no engine has ids for them.
            TooLong: see there.
        """
        steps = self.steps(text, add_special_tokens)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                ids: array[int] = end.value
                return ids

    def steps(self, text: str, add_special_tokens: bool) -> Generator[bool, None, array[int]]:
        """`encode` that can be left or put off: yields after each segment that had to be encoded, and
        returns the ids. What was encoded before it was left is remembered. True: the next step is a
        long one (a segment of more than `LONG_SEGMENT_CHARS`)."""
        if self._frame is None or not text:
            ids = yield from self._remembered(text, add_special_tokens)
            return array("I", ids)
        parts = []
        for segment in self._segmenter.segments(text):
            parts.append((yield from self._remembered(segment, False)))
        if add_special_tokens:
            before, after = self._frame
            parts = [before, *parts, after]
        return array("I", b"".join(parts))

    def _remembered(self, segment: str, add_special_tokens: bool) -> Generator[bool, None, bytes]:
        counters = self.counters
        if len(segment) > MAX_SEGMENT_CHARS:
            raise TooLong
        digest = self._cache.digest(segment.encode(), add_special_tokens)
        ids = self._cache.get(digest)
        if ids is not None:
            counters.reused_tokens += len(ids) // TOKEN_BYTES
            return ids
        if len(segment) > LONG_SEGMENT_CHARS:
            yield True
            if self._expected_tokens(segment) > MAX_SEGMENT_TOKENS:
                raise TooLong
        encoded = array("I", self._encoder.encode(segment, add_special_tokens))
        counters.encoded_tokens += len(encoded)
        ids = encoded.tobytes()
        self._cache.put(digest, ids)
        yield False
        return ids

    def _expected_tokens(self, segment: str) -> float:
        """From samples at random places: who writes a text does not know which."""
        pick = random.SystemRandom().randrange
        starts = [pick(len(segment) - _SAMPLE_CHARS) for _ in range(_SAMPLES)]
        sample = " ".join(segment[start : start + _SAMPLE_CHARS] for start in starts)
        return len(self._encoder.encode(sample, False)) * len(segment) / len(sample)


def _special_frame(encoder: TextEncoder) -> tuple[bytes, bytes] | None:
    """What the tokenizer writes before and after every text (begin and end tokens); None: not clear."""
    possible: set[tuple[bytes, bytes]] | None = None
    for probe in _PROBES:
        bare, framed = encoder.encode(probe, False), encoder.encode(probe, True)
        frames = {
            (_packed(framed[:at]), _packed(framed[at + len(bare) :]))
            for at in range(len(framed) - len(bare) + 1)
            if framed[at : at + len(bare)] == bare
        }
        possible = frames if possible is None else possible & frames
    return possible.pop() if possible and len(possible) == 1 else None


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
