"""JSON edited as bytes: where a member stands in a text, so that the rest can stay as it was written.

Re-serialising changes what a client wrote: `1e2`, `1.10`, `36893488147419103232`, escapes and the
order of duplicate keys. Here positions are found by a scan and only those bytes change. The text
must be valid JSON already (a parser has accepted it); on anything else the result is undefined but
every function ends. Pure; it knows no field names.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

Span = tuple[int, int]
Path = tuple[str, ...]

_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]|[^\s{}\[\],:"]+', re.DOTALL)
_QUOTE, _OPEN, _CLOSE, _COMMA = ord('"'), b"{[", b"}]", ord(",")


@dataclass(slots=True)
class _Container:
    """An object or array whose end has not been seen."""

    is_object: bool
    key: str | None = None  # of the member whose value comes next
    key_start: int = 0
    members: list[tuple[str, Span]] = field(default_factory=list)  # key to end of value


@dataclass(frozen=True, slots=True)
class _Value:
    """A complete value: its span, and the containers around it."""

    span: Span
    around: list[_Container]


def without_members(raw: bytes, key: str) -> bytes:
    """`raw` without every member of that name, at any depth; all other bytes as they were.

    A comma goes with the member that it belongs to. The same object if there is no such member.
    """
    return _without(raw, [cut for container in _objects(raw) for cut in _cuts(container.members, key)])


def without_top_members(raw: bytes, key: str) -> bytes:
    """`raw`, an object, without every member of that name in it; those of inner objects stay."""
    (top,) = deque(_objects(raw), maxlen=1)
    return _without(raw, _cuts(top.members, key))


def _without(raw: bytes, cuts: list[Span]) -> bytes:
    if not cuts:
        return raw
    kept, at = [], 0
    for start, end in sorted(cuts):
        kept.append(raw[at:start])
        at = max(at, end)
    kept.append(raw[at:])
    return b"".join(kept)


def find_values(raw: bytes, paths: Collection[Path]) -> dict[Path, Span]:
    """Spans of the values at `paths` (member names from the top); of duplicates the last one."""
    found: dict[Path, Span] = {}
    longest = max(map(len, paths))
    for value in _values(raw):
        if len(value.around) > longest or not all(container.is_object for container in value.around):
            continue
        path = tuple(container.key or "" for container in value.around)
        if path in paths:
            found[path] = value.span
    return found


def replaced(raw: bytes, edits: dict[Span, bytes]) -> bytes:
    """`raw` with each span (they do not overlap) exchanged."""
    pieces, at = [], 0
    for (start, end), text in sorted(edits.items()):
        pieces += [raw[at:start], text]
        at = end
    pieces.append(raw[at:])
    return b"".join(pieces)


def _cuts(members: list[tuple[str, Span]], key: str) -> list[Span]:
    """What to cut from one object: up to the next member, or, behind the last one that stays, all."""
    kept = [index for index, (name, _) in enumerate(members) if name != key]
    if len(kept) == len(members):
        return []
    last = kept[-1] if kept else -1
    cuts = [
        (span[0], members[index + 1][1][0])
        for index, (name, span) in enumerate(members[: max(last, 0)])
        if name == key
    ]
    if last < len(members) - 1:
        start = members[last][1][1] if kept else members[0][1][0]
        cuts.append((start, members[-1][1][1]))
    return cuts


def _objects(raw: bytes) -> Iterator[_Container]:
    """Every object once, complete."""
    for ended in _scan(raw, values=False):
        if isinstance(ended, _Container) and ended.is_object:
            yield ended


def _values(raw: bytes) -> Iterator[_Value]:
    for ended in _scan(raw, values=True):
        if isinstance(ended, _Value):
            yield ended


def _scan(raw: bytes, *, values: bool) -> Iterator[_Container | _Value]:
    """Containers as they end and, if asked for, values as they are complete (a container's follows it).

    `_Value.around` is the live path: read it before the next step.
    """
    path: list[_Container] = []
    starts: list[int] = []
    for token in _TOKEN.finditer(raw):
        start, end = token.span()
        first = raw[start]
        if first == _COMMA:
            continue
        if first in _OPEN:
            path.append(_Container(first == _OPEN[0]))
            starts.append(start)
            continue
        if first in _CLOSE:
            if not path:
                return
            yield path.pop()
            start = starts.pop()
        elif first == _QUOTE and path and path[-1].is_object and path[-1].key is None:
            path[-1].key, path[-1].key_start = _key(raw[start:end]), start
            continue
        if values:
            yield _Value((start, end), path)
        if path and (key := path[-1].key) is not None:
            path[-1].members.append((key, (path[-1].key_start, end)))
            path[-1].key = None


def _key(quoted: bytes) -> str:
    """A member name with its escapes resolved."""
    text = quoted.decode("utf-8", "surrogatepass")
    return text[1:-1] if "\\" not in text else str(json.loads(text, strict=False))
