"""Cut a text into segments whose tokens, put together, are the tokens of the text.

Cuts follow from the text in front of them, so two texts with a common beginning share their segments up
to about where they part: the first special token `TOKEN_CHARS` behind the last cut (the turns of a
conversation), else the first safe place `segment_chars` behind it (a long document).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from epp.request.cut_rules import AT_MARK, CutRules

SEGMENT_CHARS: Final = 2048  # about 500 tokens: a millisecond to encode, 0.05 ms to read the ids
TOKEN_CHARS: Final = 256  # less is not worth a look-up
_MAX_SEARCHES: Final = 4  # one pattern an initial character: those are searched ten times as fast
_WINDOW_CHARS: Final = 8192  # searched at a time: another thread may want the interpreter

# not a loop over blanks, of which a hostile text has millions; `\w` is `str.isalnum` and the underscore
_SAFE_BLANK: Final = re.compile(r"(?<=[^\W_\U00010000-\U0010ffff]) ").search

_FindCut = Callable[[str, int, int], int]


class Segmenter:
    """Cuts by one tokenizer's `CutRules`. Pure and thread-safe."""

    def __init__(self, rules: CutRules, *, segment_chars: int = SEGMENT_CHARS) -> None:
        """`segment_chars` 1: cut at every safe place."""
        self._segment_chars = segment_chars
        self._token_chars = min(TOKEN_CHARS, segment_chars)
        self._find_tokens = _token_finders(rules.tokens)
        self._find_any = [
            *([_find_blank] if rules.at_blanks else []),
            *([_find_mark] if rules.at_marks else []),
            *self._find_tokens,
        ]

    def segments(self, text: str) -> Iterator[str]:
        """The parts of `text` in order, none of them empty; the whole text where nothing may be cut."""
        start = 0
        while start < len(text):
            end = self._next_cut(text, start)
            yield text[start:end]
            start = end

    def _next_cut(self, text: str, last: int) -> int:
        """The end of the segment that begins at `last`."""
        start = last + self._segment_chars
        cut = _first(self._find_tokens, text, last + self._token_chars, start)
        while cut < 0 and self._find_any and start < len(text):
            cut = _first(self._find_any, text, start, start + _WINDOW_CHARS)
            start += _WINDOW_CHARS
        return cut if cut >= 0 else len(text)


def _first(finders: Sequence[_FindCut], text: str, start: int, end: int) -> int:
    """The first place in [start, end) that any of them finds; -1: none."""
    found = -1
    for find in finders:  # the later ones look only in front of what was found
        cut = find(text, start, end)
        if cut >= 0:
            end = found = cut
    return found


def _find_blank(text: str, start: int, end: int) -> int:
    """A blank behind a letter or digit of the basic plane; -1: none in [start, end)."""
    found = _SAFE_BLANK(text, start, end)
    return found.start() if found else -1


def _find_mark(text: str, start: int, end: int) -> int:
    found = AT_MARK.search(text, start, end)
    return found.start() if found else -1


def _token_finders(tokens: tuple[str, ...]) -> list[_FindCut]:
    groups: dict[str, list[str]] = {}
    for token in sorted(tokens, key=len, reverse=True):
        groups.setdefault(token[0], []).append(token)
    if len(groups) > _MAX_SEARCHES:
        groups = {"": list(tokens)}
    return [_token_finder(group) for group in groups.values()]


def _token_finder(tokens: Sequence[str]) -> _FindCut:
    search = re.compile("|".join(map(re.escape, tokens))).search
    reach = max(map(len, tokens)) - 1

    def find(text: str, start: int, end: int) -> int:
        found = search(text, start, end + reach)
        return found.start() if found and found.start() < end else -1

    return find
