"""The model's name in an answer, in every body mode and under gzip."""

from __future__ import annotations

import gzip
import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.extproc import events as ev
from epp.extproc.body_edit import GzipEdit, edit_of, kept_or_replaced
from epp.extproc.model_name import ModelNameEdit

TEXT = b'{"id": 1, "model": "base", "text": "' + bytes(range(97, 123)) * 100 + b'"}'
WANTED = TEXT.replace(b'"base"', b'"alias"')
RESPONSE = ev.Direction.RESPONSE


def name_edit() -> ModelNameEdit:
    return ModelNameEdit("base", "alias")


def fed(data: bytes, cuts: list[int]) -> bytes:
    edit, edges = GzipEdit(name_edit()), sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    parts = [data[start:end] for start, end in itertools.pairwise(edges)]
    return b"".join(edit.feed(part, end=False) for part in parts) + edit.feed(b"", end=True)


@given(st.lists(st.integers(0, 10_000), max_size=8))
def test_gzip_in_any_cuts(cuts: list[int]) -> None:
    assert gzip.decompress(fed(gzip.compress(TEXT), cuts)) == WANTED


def test_members_one_after_another_become_one_text() -> None:
    data = gzip.compress(TEXT[:17]) + gzip.compress(TEXT[17:])
    assert gzip.decompress(fed(data, [])) == WANTED


def test_a_piece_goes_on_with_the_piece_it_came_in() -> None:
    pack = zlib.compressobj(wbits=31)
    first = pack.compress(TEXT) + pack.flush(zlib.Z_SYNC_FLUSH)
    out = GzipEdit(name_edit()).feed(first, end=False)
    assert zlib.decompressobj(31).decompress(out) == WANTED


@given(st.binary(min_size=2, max_size=50).filter(lambda data: data[:2] != b"\x1f\x8b"))
def test_what_is_no_gzip_passes_as_it_came(data: bytes) -> None:
    edit = GzipEdit(name_edit())
    assert edit.feed(data, end=False) + edit.feed(data, end=True) == data * 2


@pytest.mark.parametrize(
    ("encodings", "mode", "edits"),
    [
        ((), ev.BodyMode.STREAMED, True),
        (("gzip",), ev.BodyMode.FULL_DUPLEX_STREAMED, True),
        (("x-gzip",), ev.BodyMode.BUFFERED, True),
        (("gzip",), ev.BodyMode.STREAMED, False),  # a message of it means nothing alone
        (("br",), ev.BodyMode.BUFFERED, False),
        (("gzip", "gzip"), ev.BodyMode.BUFFERED, False),
    ],
)
def test_what_can_be_edited(encodings: tuple[str, ...], mode: ev.BodyMode, edits: bool) -> None:
    assert (edit_of(name_edit(), encodings, mode) is not None) == edits


def test_a_body_is_replaced_where_it_changes_only() -> None:
    buffered, streamed = ev.BodyMode.BUFFERED, ev.BodyMode.STREAMED
    assert kept_or_replaced(None, TEXT, buffered) == ev.KeepBody(RESPONSE)
    assert kept_or_replaced(name_edit(), b"{}", buffered) == ev.KeepBody(RESPONSE)
    assert kept_or_replaced(name_edit(), TEXT, buffered) == ev.ReplaceBody(WANTED, whole=True)
    assert kept_or_replaced(name_edit(), TEXT, streamed) == ev.ReplaceBody(WANTED, whole=False)


def test_streamed_mode_loses_no_byte_of_a_name_that_is_cut() -> None:
    """It stays as it was: the rest of the message could not be sent later."""
    edit, at = name_edit(), TEXT.index(b"base") + 2
    actions = [kept_or_replaced(edit, part, ev.BodyMode.STREAMED) for part in (TEXT[:at], TEXT[at:])]
    assert actions == [ev.KeepBody(RESPONSE)] * 2
