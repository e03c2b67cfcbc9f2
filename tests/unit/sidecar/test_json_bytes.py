"""Editing JSON as bytes: a parser sees the same document, and every other byte is the same."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.json_bytes import find_values, replaced, without_members, without_top_members


class _Pairs(list[Any]):
    """An object whose keys may repeat."""


_KEYS = st.sampled_from(["k", "a", "b", 'q"uote', "back\\slash", "ünï", "{", "]", ",", ":"])
_DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | _KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(_KEYS, inner), max_size=5).map(_Pairs),
    max_leaves=25,
)


def _write(value: Any, space: str, escape: bool, without: str | None = None) -> str:
    """JSON text with duplicate keys and odd spaces."""
    if isinstance(value, _Pairs):
        kept = [(k, v) for k, v in value if k != without]
        return (
            f"{{{space}"
            + ",".join(
                f"{space}{_key(k, escape)}{space}:{space}{_write(v, space, escape, without)}{space}"
                for k, v in kept
            )
            + f"{space}}}"
        )
    if isinstance(value, list):
        return f"[{space}" + ",".join(_write(item, space, escape, without) for item in value) + "]"
    return json.dumps(value, ensure_ascii=escape)


def _key(key: str, escape: bool) -> str:
    return '"' + "".join(f"\\u{ord(c):04x}" for c in key) + '"' if escape else json.dumps(key)


@given(_DOCUMENTS, st.sampled_from(["", " ", "\n\t "]), st.booleans())
def test_members_go_and_the_rest_is_the_same_text(document: Any, space: str, escape: bool) -> None:
    raw = _write(document, space, escape).encode("utf-8", "surrogatepass")
    cleaned = without_members(raw, "k")
    expected = _write(document, space, escape, without="k").encode("utf-8", "surrogatepass")
    pairs = {"object_pairs_hook": _Pairs}
    assert json.loads(cleaned, **pairs) == json.loads(expected, **pairs)  # type: ignore[arg-type]
    assert _no_blanks(cleaned) == _no_blanks(expected)


def _no_blanks(raw: bytes) -> bytes:
    """Without the spaces between tokens: which of them go with a member is nobody's concern."""
    return b"".join(re.findall(rb'"(?:[^"\\]|\\.)*"|[^\s"]+', raw, re.DOTALL))


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        (b'{"k":1}', b"{}"),
        (b'{"k":1,"k":2}', b"{}"),
        (b'{"a":1e2,"k":{"k":[{}]}}', b'{"a":1e2}'),
        (b'{"k":1, "a":1.10}', b'{"a":1.10}'),
        (b'{"a":1,"k":1,"k":2,"b":36893488147419103232,"k":3}', b'{"a":1,"b":36893488147419103232}'),
        (b'[{"k":"}\\"]"},{"x":{"\\u006b":1,"y":0.0}}]', b'[{},{"x":{"y":0.0}}]'),
    ],
)
def test_examples(raw: bytes, cleaned: bytes) -> None:
    assert without_members(raw, "k") == cleaned


@pytest.mark.parametrize("raw", [b"{}", b"1", b'{"a":"k"}', b'["k",{"kk":"k"}]'])
def test_the_same_object_where_there_is_nothing(raw: bytes) -> None:
    assert without_members(raw, "k") is raw


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        (b'{"k":{"k":1},"a":{"k":2,"b":[{"k":3}]},"k":4}', b'{"a":{"k":2,"b":[{"k":3}]}}'),
        (b'{"a":{"k":1,"b":2,"k":3}}', b'{"a":{"k":1,"b":2,"k":3}}'),
        (b'{"k":[],"\\u006b":1,"a":[{"k":1}]}', b'{"a":[{"k":1}]}'),
    ],
)
def test_members_of_inner_objects_stay_where_only_those_of_the_top_are_meant(
    raw: bytes, cleaned: bytes
) -> None:
    assert without_top_members(raw, "k") == cleaned


def test_memory_does_not_follow_the_number_of_members() -> None:
    """A client's 31 MB of members once cost a sidecar 1.4 GB."""
    raw = b'{"x":{' + b'"a":1,' * 20_000 + b'"k":1}}'
    tracemalloc.start()
    try:
        cleaned = without_members(raw, "k")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cleaned == raw.replace(b',"k":1', b"")
    assert peak_bytes < 4 * len(raw)


def test_values_are_found_by_path_only() -> None:
    raw = b'{"c":1,"u":[{"c":2}],"x":{"u":{"c":3}},"u":{"d":{"c":4},"c": 5 },"s":"\\"u\\":{\\"c\\":6}"}'
    found = find_values(raw, {("u", "c"), ("u", "d", "c"), ("u", "e")})
    assert {path: raw[slice(*span)] for path, span in found.items()} == {
        ("u", "c"): b"5",
        ("u", "d", "c"): b"4",
    }
    edited = replaced(raw, {found[("u", "c")]: b"77", found[("u", "d", "c")]: b""})
    assert edited == raw.replace(b" 5 ", b" 77 ").replace(b":4}", b":}")


def test_of_duplicates_the_last_counts() -> None:
    raw = b'{"u":{"c":1},"u":{"c":22}}'
    assert raw[slice(*find_values(raw, {("u", "c")})[("u", "c")])] == b"22"


@given(st.binary(max_size=200))
def test_any_bytes_end(raw: bytes) -> None:
    for function in (lambda: without_members(raw, "k"), lambda: find_values(raw, {("u",)})):
        try:
            function()
        except (ValueError, UnicodeDecodeError):
            continue


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"k":1}', b"{}"),
        (b'{ "k" : {"k":2} , "a":[{"k":3}] }', b'{ "a":[{"k":3}] }'),
        (b'{"a":{"k":1},"k":2,"k":3}', b'{"a":{"k":1}}'),
        (b'{"\\u006b":1,"a":"\\"k\\":2"}', b'{"a":"\\"k\\":2"}'),
    ],
)
def test_only_members_of_the_object_itself_go(raw: bytes, expected: bytes) -> None:
    assert without_top_members(raw, "k") == expected
    assert without_top_members(expected, "k") is expected
