"""One loader, one error: hostile texts, and honest ones that must still load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.yaml_text import MAX_DEPTH, YamlTextError, load_yaml, read_text
from tests.unit.sidecar.hostile_yaml import HOSTILE

KIB64 = 1 << 16


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_one_error_of_one_line(text: str) -> None:
    with pytest.raises(YamlTextError) as caught:
        load_yaml(text, max_bytes=1 << 20)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_honest_text() -> None:
    text = "base: &base {a: 1, b: [x, 2.5, null, yes]}\nmerged: {<<: *base, a: 2}\n1: n\n'1': t\n"
    base = {"a": 1, "b": ["x", 2.5, None, True]}
    assert load_yaml(text, max_bytes=KIB64) == {"base": base, "merged": {**base, "a": 2}, 1: "n", "1": "t"}
    assert load_yaml("", max_bytes=KIB64) is None
    assert load_yaml("7" * 60, max_bytes=KIB64) == int("7" * 60)
    assert load_yaml("x" * 5000, max_bytes=KIB64) == "x" * 5000
    assert load_yaml('{"a":\t[1, {"b": "c"}]}', max_bytes=KIB64) == {"a": [1, {"b": "c"}]}


def test_the_limits_are_exact() -> None:
    assert load_yaml("é" * 8, max_bytes=16) == "é" * 8
    with pytest.raises(YamlTextError, match="larger than 15 bytes"):
        load_yaml("é" * 8, max_bytes=15)
    load_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, max_bytes=KIB64)
    with pytest.raises(YamlTextError, match=f"deeper than {MAX_DEPTH} levels, line 1, column 65"):
        load_yaml("[" * (MAX_DEPTH + 1), max_bytes=KIB64)


PIECES = st.sampled_from(
    [
        "a",
        ": ",
        "\n",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "&a ",
        "*a",
        "!!int ",
        "!!float ",
        "!!timestamp ",
        "!!map ",
        "!!set ",
        "!!omap ",
        "!!binary ",
        "0x",
        "0b",
        "_",
        ".",
        "1",
        ":1",
        "<<",
        "? ",
        '"',
        "'",
        "\t",
        "  ",
        "2026-02-31",
        "\ufeff",
        "%YAML 9",
        "---",
        "...",
        "\\",
    ]
)


@given(st.lists(PIECES | st.text(max_size=3), max_size=30).map("".join))
def test_any_text_loads_or_is_refused(text: str) -> None:
    try:
        load_yaml(text, max_bytes=KIB64)
    except YamlTextError as error:
        assert str(error)  # noqa: PT017  # any other type ends the test


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_text(path, max_bytes=5) == "12345"
    with pytest.raises(YamlTextError, match="larger than 4 bytes"):
        read_text(path, max_bytes=4)
    path.write_bytes(b"a\xff")
    with pytest.raises(YamlTextError, match=r"not UTF-8: .* at byte 1"):
        read_text(path, max_bytes=5)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "absent", max_bytes=5)


@pytest.mark.timeout(10)
def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(YamlTextError, match="not a regular file"):
        read_text(tmp_path / "fifo", max_bytes=5)
    with pytest.raises((YamlTextError, IsADirectoryError)):
        read_text(tmp_path, max_bytes=5)
