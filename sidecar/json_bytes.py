"""JSON edited as bytes: where a member stands in a text, so that the rest can stay as it was written.

Re-serialising changes what a client wrote: `1e2`, `1.10`, `36893488147419103232`, escapes and the
order of duplicate keys. Here positions are found by a scan and only those bytes change. The text
must be valid JSON already (a parser has accepted it); on anything else the result is undefined but
every function ends. Pure; it knows no field names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

Span = tuple[int, int]
Path = tuple[str, ...]

_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]|[^\s{}\[\],:"]+', re.DOTALL)
_QUOTE, _OPEN, _CLOSE, _COMMA = ord('"'), b"{[", b"}]", ord(",")


@dataclass(slots=True)
class _Container:
    """An object or array whose end has not been seen. It counts nothing that grows with its members."""

    is_object: bool
    key: str | None = None  # of the member whose value comes next
    key_start: int = 0
    kept_end: int | None = None  # of the last member that stays
    cut_start: int | None = None  # of the first of the unwanted members at its end
    cut_end: int = 0


def without_members(raw: bytes, key: str) -> bytes:
    """`raw` without every member of that name, at any depth; all other bytes as they were.

    A comma goes with the member that it belongs to. The same object if there is no such member. Memory
    follows the depth and the number of cuts, not the number of members.
    """
    return _without(raw, sorted(_cuts(raw, key)))


def without_top_members(raw: bytes, key: str) -> bytes:
    """`raw`, an object, without every member of that name in it; those of inner objects stay."""
    return _without(raw, sorted(_cuts(raw, key, inner=False)))


def _without(raw: bytes, cuts: list[Span]) -> bytes:
    if not cuts:
        return raw
    kept, at = [], 0
    for start, end in cuts:
        kept.append(raw[at:start])
        at = max(at, end)
    kept.append(raw[at:])
    return b"".join(kept)


def find_values(raw: bytes, paths: Collection[Path]) -> dict[Path, Span]:
    """Spans of the values at `paths` (member names from the top); of duplicates the last one."""
    found: dict[Path, Span] = {}
    longest = max(map(len, paths))
    for start, end, around, _ in _scan(raw):
        if len(around) > longest or not all(container.is_object for container in around):
            continue
        path = tuple(container.key or "" for container in around)
        if path in paths:
            found[path] = start, end
    return found


def replaced(raw: bytes, edits: dict[Span, bytes]) -> bytes:
    """`raw` with each span (they do not overlap) exchanged."""
    pieces, at = [], 0
    for (start, end), text in sorted(edits.items()):
        pieces += [raw[at:start], text]
        at = end
    pieces.append(raw[at:])
    return b"".join(pieces)


def _cuts(raw: bytes, key: str, *, inner: bool = True) -> Iterator[Span]:
    """What to cut of each object: up to the next member that stays, or, behind the last that stays, all."""
    for _, end, around, ended in _scan(raw):
        if ended is not None and ended.cut_start is not None:
            yield ended.cut_start if ended.kept_end is None else ended.kept_end, ended.cut_end
        if not around or (name := around[-1].key) is None:
            continue
        of = around[-1]
        if name != key or not (inner or len(around) == 1):
            if of.cut_start is not None:
                yield of.cut_start, of.key_start
            of.cut_start, of.kept_end = None, end
        else:
            of.cut_start = of.key_start if of.cut_start is None else of.cut_start
            of.cut_end = end


def _scan(raw: bytes) -> Iterator[tuple[int, int, list[_Container], _Container | None]]:
    """Every value when it is complete: its span, the containers around it, and the container that it is.

    The containers around it are the live path: read it before the next step.
    """
    path: list[_Container] = []
    starts: list[int] = []
    for token in _TOKEN.finditer(raw):
        start, end = token.span()
        first = raw[start]
        ended = None
        if first == _COMMA:
            continue
        if first in _OPEN:
            path.append(_Container(first == _OPEN[0]))
            starts.append(start)
            continue
        if first in _CLOSE:
            if not path:
                return
            ended = path.pop()
            start = starts.pop()
        elif first == _QUOTE and path and path[-1].is_object and path[-1].key is None:
            path[-1].key, path[-1].key_start = _key(raw[start:end]), start
            continue
        yield start, end, path, ended
        if path:
            path[-1].key = None


def _key(quoted: bytes) -> str:
    """A member name with its escapes resolved."""
    text = quoted.decode("utf-8", "surrogatepass")
    return text[1:-1] if "\\" not in text else str(json.loads(text, strict=False))
