"""The model's name goes back to what the client asked for, in documents and streams, at every cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.extproc.model_name import ModelNameEdit
from epp.request.model_rewrite import rewrite_model

ENGINE, CLIENT = "llama-70b-v2", "llama"
EVENTS = """data: {"id":"1","model":"llama-70b-v2","text":"\\"model\\": \\"llama-70b-v2\\""}

data: {"type":"response.created","response":{"model" : "llama-70b-v2","models":"llama-70b-v2"}}

data: {"model":"llama-70b-v2-other"}

data: [DONE]

"""
STREAM = EVENTS.encode()
EXPECTED = (
    EVENTS.replace('"model":"llama-70b-v2"', '"model":"llama"')
    .replace('"model" : "llama-70b-v2"', '"model" : "llama"')
    .encode()
)


def fed(data: bytes, cuts: list[int], edit: ModelNameEdit | None = None) -> bytes:
    edit = edit or ModelNameEdit(ENGINE, CLIENT)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    parts = [data[start:end] for start, end in itertools.pairwise(edges)]
    return b"".join(edit.feed(part, end=index == len(parts) - 1) for index, part in enumerate(parts))


def test_every_single_cut_and_every_byte_alone() -> None:
    for cut in range(len(STREAM)):
        assert fed(STREAM, [cut]) == EXPECTED
    assert fed(STREAM, list(range(len(STREAM)))) == EXPECTED


@given(st.lists(st.integers(1, len(STREAM))))
def test_any_cuts(cuts: list[int]) -> None:
    assert fed(STREAM, cuts) == EXPECTED


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_other_bytes_pass_unchanged(data: bytes, cuts: list[int]) -> None:
    data = data.replace(b"model", b"")
    assert fed(data, cuts) == data


def test_whole_events_are_never_held() -> None:
    edit = ModelNameEdit(ENGINE, CLIENT)
    assert edit.feed(b'data: {"x":"y"}\n\n', end=False) == b'data: {"x":"y"}\n\n'


@pytest.mark.parametrize("written", ["ünïcode/7b", 'quo"te', "back\\slash"])
def test_names_in_either_form_of_json(written: str) -> None:
    for ascii_only in (True, False):
        data = json.dumps({"model": written}, ensure_ascii=ascii_only).encode()
        assert json.loads(fed(data, [], ModelNameEdit(written, "wanted"))) == {"model": "wanted"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            b'{ "prompt":"a\\u0041", "model" : "x", "n":1.10}',
            b'{ "prompt":"a\\u0041", "model" : "new", "n":1.10}',
        ),
        (b'{"inner":{"model":"x"}}', None),
        (b'{"model":7}', None),
        (b'["model","x"]', None),
        (b"not json", None),
        (b'{"prompt":"\\"model\\":\\"x\\"","model":"x"}', b'{"prompt":"\\"model\\":\\"x\\"","model":"new"}'),
    ],
)
def test_a_requests_model_is_exchanged_and_nothing_else(body: bytes, expected: bytes | None) -> None:
    assert rewrite_model(body, "new") == expected
