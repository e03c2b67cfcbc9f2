"""Cut a text into segments whose tokens, put together, are the tokens of the text.

Cuts follow from the text in front of them (the first safe place at least `segment_chars` behind the
last cut), so two texts with a common beginning share their segments up to about where they part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from epp.request.cut_rules import CutRules

SEGMENT_CHARS: Final = 2048  # about 500 tokens: a millisecond to encode, 0.05 ms to read the ids
_WINDOW_CHARS: Final = 8192  # searched at a time: another thread may want the interpreter

_FindCut = Callable[[str, int, int], int]


class Segmenter:
    """Cuts by one tokenizer's `CutRules`. Pure and thread-safe."""

    def __init__(self, rules: CutRules, *, segment_chars: int = SEGMENT_CHARS) -> None:
        """`segment_chars` 1: cut at every safe place."""
        self._segment_chars = segment_chars
        self._finders: list[_FindCut] = []
        if rules.at_blanks:
            self._finders.append(_find_blank)
        if rules.tokens:
            self._finders.append(_token_finder(rules.tokens))

    def segments(self, text: str) -> Iterator[str]:
        """The parts of `text` in order, none of them empty; the whole text where nothing may be cut."""
        start = 0
        while start < len(text):
            end = self._next_cut(text, start + self._segment_chars)
            yield text[start:end]
            start = end

    def _next_cut(self, text: str, start: int) -> int:
        """The first safe place at or behind `start`, else the end of the text."""
        if not self._finders:
            return len(text)
        while start < len(text):
            end, found = start + _WINDOW_CHARS, -1
            for find in self._finders:  # the later one looks only in front of what was found
                cut = find(text, start, end)
                if cut >= 0:
                    end = found = cut
            if found >= 0:
                return found
            start = end
        return len(text)


def _find_blank(text: str, start: int, end: int) -> int:
    """A blank behind a letter or digit of the basic plane; -1: none in [start, end)."""
    at = text.find(" ", start, end)
    while at > 0:
        before = text[at - 1]
        if before.isalnum() and before < "\U00010000":
            return at
        at = text.find(" ", at + 1, end)
    return -1


def _token_finder(tokens: tuple[str, ...]) -> _FindCut:
    search = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))).search
    longest = max(map(len, tokens))

    def find(text: str, start: int, end: int) -> int:
        found = search(text, start, end + longest - 1)
        return found.start() if found and found.start() < end else -1

    return find
