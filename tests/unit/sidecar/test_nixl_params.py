"""A prefill answer's kv_transfer_params: what is believed, and what is a failed prefill."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.allowlist import AllowList
from sidecar.endpoint_file import parse_endpoint_rows
from sidecar.errors import PrefillParamsInvalid
from sidecar.nixl_params import MAX_BLOCK_IDS, MAX_DEPTH, check_prefill_params

_ROWS = parse_endpoint_rows(b'{"endpoints":[{"pod":"a","host":"10.0.0.2","serving_port":8000}]}', "test")
_POOL = AllowList(_ROWS)
_GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e-1",
    "remote_block_ids": [1, 2, 3],
    "remote_host": "10.0.0.2",
    "remote_port": 5600,
}
_DEEP: list[Any] = []
for _ in range(MAX_DEPTH):
    _DEEP = [_DEEP]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"remote_block_ids": [[1], [2, 3]]},
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_host": "::ffff:10.0.0.2"},
        {"remote_request_id": "r", "tp_size": 8, "new": {"x": [None, "y"]}},
        {"remote_kv_source": None},
    ],
)
def test_accepted(more: dict[str, Any]) -> None:
    check_prefill_params({**_GOOD, **more}, _POOL)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"remote_host": "10.0.0.3"}, "remote_host"),
        ({"remote_host": "a.example"}, "remote_host"),
        ({"remote_host": "10.0.0.2/x"}, "remote_host"),
        ({"remote_host": ["10.0.0.2"]}, "remote_host"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_engine_id": ""}, "remote_engine_id"),
        ({"remote_engine_id": "x" * 257}, "remote_engine_id"),
        ({"remote_engine_id": "a\nb"}, "remote_engine_id"),
        ({"remote_request_id": 7}, "remote_request_id"),
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_block_ids": "123"}, "remote_block_ids"),
        ({"remote_block_ids": [1, -1]}, "remote_block_ids"),
        ({"remote_block_ids": [1.0]}, "remote_block_ids"),
        ({"remote_block_ids": [True]}, "remote_block_ids"),
        ({"remote_block_ids": [[1], 2]}, "remote_block_ids"),
        ({"remote_block_ids": [[[1]]]}, "remote_block_ids"),
        ({"remote_block_ids": [0] * (MAX_BLOCK_IDS + 1)}, "remote_block_ids"),
        ({"do_remote_prefill": False}, "do_remote_prefill"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"do_remote_decode": True}, "do_remote_decode"),
        ({"remote_kv_source": {"remote_host": "10.6.6.6"}}, "remote_kv_source"),
        ({"remote_prefiller": {"remote_host": "10.6.6.6"}}, "remote_prefiller"),
        ({"new": "x" * (5 << 20)}, "too large"),
        ({"new": _DEEP}, "too large"),
        ({"new": 1 << 70}, "written again"),
        ({"new": "\ud800"}, "written again"),
    ],
)
def test_refused_by_field_without_its_value(more: dict[str, Any], field: str) -> None:
    with pytest.raises(PrefillParamsInvalid) as refusal:
        check_prefill_params({**_GOOD, **more}, _POOL)
    assert field in str(refusal.value)
    assert "10." not in str(refusal.value)


@pytest.mark.parametrize("name", [name for name in _GOOD if name != "do_remote_decode"])
def test_no_field_may_be_missing(name: str) -> None:
    with pytest.raises(PrefillParamsInvalid):
        check_prefill_params({key: value for key, value in _GOOD.items() if key != name}, _POOL)


def test_without_protection_the_host_only_has_to_look_like_one() -> None:
    pool = AllowList(enforced=False)
    check_prefill_params({**_GOOD, "remote_host": "node-7.example"}, pool)
    with pytest.raises(PrefillParamsInvalid):
        check_prefill_params({**_GOOD, "remote_host": "a b"}, pool)


@given(
    st.dictionaries(
        st.sampled_from(sorted(_GOOD)), st.none() | st.integers() | st.text() | st.lists(st.integers())
    )
)
def test_nothing_else_is_raised(more: dict[str, Any]) -> None:
    try:
        check_prefill_params({**_GOOD, **more}, _POOL)
    except PrefillParamsInvalid:
        return
