"""YAML that others wrote, read with bounds: one loader for every file this project takes.

PyYAML's `safe_load` is safe against code, not against input: it raises half a dozen exception types,
the pure loader needs seconds for a megabyte, nesting ends in the stack, an alias can stand for millions
of nodes and a second `enabled:` silently replaces the first. Here all of that is one error. It knows
no document format, and error texts hold no more of the input than the parser's own excerpt.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # PyYAML built without libyaml
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

MAX_DEPTH: Final = 64
MAX_NODES: Final = 1 << 20  # with every alias counted as the nodes that it stands for
MAX_NUMBER_CHARS: Final = 64  # long numbers cost quadratic time (`1:59:59:...` is an integer in YAML 1.1)
_MAX_ERROR_CHARS: Final = 400

_TAG: Final = "tag:yaml.org,2002:"
_NUMBERS: Final = (_TAG + "int", _TAG + "float", _TAG + "timestamp")
# what PyYAML's constructors let through for values of a wrong form, besides its own errors
_FAULTS: Final = (
    yaml.YAMLError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class YamlTextError(ValueError):
    """The text cannot be used; one line that says why, and where in the text if that is known."""


def load_yaml(text: str, *, max_bytes: int) -> object:
    """The one document in `text` as plain Python values; None if `text` is empty.

    Raises:
        YamlTextError: longer than `max_bytes` in UTF-8, not YAML, a value without the form of its tag,
            a mapping key twice, or more nesting or aliases than any honest document has.
    """
    try:
        if len(text) > max_bytes or len(text.encode()) > max_bytes:
            raise YamlTextError(f"larger than {max_bytes} bytes")
        _check_structure(text)
        return yaml.load(text, Loader=_Loader)  # one of the safe loaders
    except YamlTextError:
        raise
    except _FAULTS as error:
        raise YamlTextError(f"not YAML: {_one_line(error)}") from error


def read_text(path: str | Path, *, max_bytes: int) -> str:
    """The UTF-8 text of a regular file; of anything else nothing is read, so a FIFO cannot block.

    Raises:
        YamlTextError: not a regular file, longer than `max_bytes`, or not UTF-8.
        OSError: cannot be opened or read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise YamlTextError("not a regular file")
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise YamlTextError(f"larger than {max_bytes} bytes")
    return decode_text(raw)


def decode_text(raw: bytes) -> str:
    """`raw` as UTF-8.

    Raises:
        YamlTextError: it is not.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise YamlTextError(f"not UTF-8: {error.reason} at byte {error.start}") from error


@dataclass(slots=True)
class _Open:
    """A sequence or mapping whose end has not been seen."""

    is_mapping: bool
    anchor: str | None
    nodes: int = 1  # itself and all below it, aliases expanded
    children: int = 0  # of a mapping: key, value, key, ...
    keys: set[tuple[str, str]] = field(default_factory=set)


def _check_structure(text: str) -> None:
    """Look at the parser's events, which need no recursion, before anything is built from them."""
    loader = _Loader(text)
    path = [_Open(is_mapping=False, anchor=None)]  # the stream itself
    nodes_of: dict[str, int] = {}
    try:
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.CollectionStartEvent):
                if len(path) > MAX_DEPTH:
                    raise YamlTextError(f"nested deeper than {MAX_DEPTH} levels{_place(event)}")
                if event.anchor is not None:
                    nodes_of.pop(event.anchor, None)  # an alias inside would be a cycle
                path.append(_Open(isinstance(event, yaml.MappingStartEvent), event.anchor))
            elif isinstance(event, yaml.CollectionEndEvent):
                ended = path.pop()
                _add(path[-1], ended.anchor, ended.nodes, nodes_of)
            elif isinstance(event, yaml.ScalarEvent):
                _check_scalar(loader, event, path[-1])
                _add(path[-1], event.anchor, 1, nodes_of)
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in nodes_of:
                    raise YamlTextError(f"alias of nothing that is complete{_place(event)}")
                _add(path[-1], None, nodes_of[event.anchor], nodes_of)
    finally:
        loader.dispose()


def _add(parent: _Open, anchor: str | None, nodes: int, nodes_of: dict[str, int]) -> None:
    """Count one complete child of `parent`."""
    parent.children += 1
    parent.nodes += nodes
    if parent.nodes > MAX_NODES:
        raise YamlTextError(f"more than {MAX_NODES} values, aliases expanded")
    if anchor is not None:
        nodes_of[anchor] = nodes


def _check_scalar(loader: Any, event: Any, parent: _Open) -> None:
    is_key = parent.is_mapping and parent.children % 2 == 0
    if not is_key and len(event.value) <= MAX_NUMBER_CHARS:
        return
    tag = event.tag
    if tag is None or tag == "!":
        tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    if len(event.value) > MAX_NUMBER_CHARS and tag in _NUMBERS:
        raise YamlTextError(f"a number of {len(event.value)} characters{_place(event)}")
    if is_key:
        if (tag, event.value) in parent.keys:
            raise YamlTextError(f"key {event.value[:MAX_NUMBER_CHARS]!r} twice in one mapping{_place(event)}")
        parent.keys.add((tag, event.value))


def _place(event: Any) -> str:
    return f", line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"


def _one_line(error: BaseException) -> str:
    """Without line ends: the text goes into logs."""
    text = " ".join(str(error).split())
    if not isinstance(error, yaml.YAMLError):
        text = f"a value has not the form of its type ({type(error).__name__}: {text})"
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
