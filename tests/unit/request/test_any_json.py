"""Any JSON and any bytes on any path: a prompt, a reason, or a 400 for what is no JSON. Never a fault."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.errors import BadRequest
from epp.request.parse import MATCHED_PATHS, parse_request
from epp.request.prompts import NoPrompt
from epp.request.shapes import chat, completions, messages, responses, tokens_in

HEADERS = {"content-type": "application/json"}
PATHS = st.sampled_from((*MATCHED_PATHS, "/v1/x"))

# words that the shapes look for, so that their branches are reached
WORDS = """
    user assistant system tool developer text input_text output_text reasoning_text summary_text message
    reasoning function function_call function_call_output tool_use tool_result thinking image image_url
    in_progress enabled disabled none high x
"""
KEYS = """
    type role content text input output id call_id name arguments status summary thinking tool_use_id
    function parameters input_schema description strict effort tool_calls image_url uuid annotations
"""
NAMES = """
    prompt messages tools cache_salt stream add_special_tokens chat_template_kwargs input instructions
    reasoning reasoning_effort system thinking output_config token_ids features model documents
    previous_response_id truncation add_generation_prompt continue_final_message
"""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.sampled_from(WORDS.split()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=5)
    ),
    max_leaves=16,
)
FIELDS = st.dictionaries(st.sampled_from(NAMES.split()), VALUES)


@settings(max_examples=150, deadline=None)
@given(FIELDS, PATHS)
def test_any_json_has_a_prompt_or_a_reason(fields: dict[str, Any], path: str) -> None:
    request = parse_request(json.dumps(fields).encode(), path, HEADERS)
    assert (request.prompt is None) == (request.no_prompt is not None)


@settings(max_examples=100, deadline=None)
@given(FIELDS, st.sampled_from([chat, completions, messages, responses, tokens_in]))
def test_shapes_change_nothing_they_are_given(fields: dict[str, Any], shape: Any) -> None:
    before = copy.deepcopy(fields)
    with contextlib.suppress(NoPrompt):
        shape.read_prompt(fields)
    assert repr(fields) == repr(before)  # NaN is not equal to itself


@settings(deadline=None)
@given(st.binary(max_size=64), PATHS, st.sampled_from(["", "gzip", "zstd", "gzip, zstd", "br"]))
def test_any_bytes_are_routed_or_refused(body: bytes, path: str, encoding: str) -> None:
    try:
        parse_request(body, path, HEADERS | {"content-encoding": encoding})
    except BadRequest:
        assert path != "/v1/x"
        assert not encoding


@settings(deadline=None)
@given(FIELDS, PATHS, st.integers(0, 400), st.integers(0, 255))
def test_a_broken_byte_is_no_fault(fields: dict[str, Any], path: str, at: int, byte: int) -> None:
    body = bytearray(json.dumps(fields).encode())
    body[at % len(body)] = byte
    try:
        parse_request(bytes(body), path, HEADERS)
    except BadRequest:
        assert path != "/v1/x"
