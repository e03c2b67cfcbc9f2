"""Body rewriting: every row of contracts section 3, and bytes that are exactly the client's."""

from __future__ import annotations

import copy
import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import kv_params
from sidecar.errors import BodyInvalid, BodyTooLarge
from sidecar.kv_params import Api

_PULL = kv_params.pull_params("id-1", "10.0.0.3", 7779)
_KEY = "kv_transfer_params"

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
_FIELDS = st.sampled_from(
    [
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "max_output_tokens",
        "n",
        "best_of",
        "stream",
        "stream_options",
        "sampling_params",
        "seed",
        "tools",
        "logprobs",
        "store",
        "ünïcode",
    ]
)
_BODIES = st.dictionaries(_FIELDS | st.text(), _JSON, max_size=10).filter(lambda body: _KEY not in body)


# --- contracts section 3, row by row -----------------------------------------------------------


def test_aggregated_with_a_source() -> None:
    assert _PULL == {
        "remote_kv_source": {"kv_request_id": "id-1", "remote_host": "10.0.0.3", "remote_port": 7779}
    }


@pytest.mark.parametrize("pull", [None, _PULL], ids=["no source", "source"])
def test_offloading_legs(pull: dict[str, Any] | None) -> None:
    prefill = kv_params.offloading_prefill_params("id-1", pull)
    decode = kv_params.offloading_decode_params("id-1", "10.0.0.2", 7777)
    assert prefill == {"remote_decoder": {"kv_request_id": "id-1"}, **(pull or {})}
    assert decode == {
        "remote_prefiller": {"kv_request_id": "id-1", "remote_host": "10.0.0.2", "remote_port": 7777}
    }


@pytest.mark.parametrize("pull", [None, _PULL], ids=["no source", "source"])
def test_nixlv2_prefill_leg(pull: dict[str, Any] | None) -> None:
    assert kv_params.nixl_prefill_params(pull) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        **(pull or {}),
    }


def test_nixlv2_decode_leg_takes_the_prefill_answers_params_verbatim() -> None:
    params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2], [3]],
        "remote_port": 5600,
        "new": {"x": None},
    }
    answer = json.dumps({"id": "cmpl-1", _KEY: params}).encode()
    assert kv_params.prefill_answer_params(answer) == params


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"kv_transfer_params":null}', b"data: {}"])
def test_a_prefill_answer_without_params(answer: bytes) -> None:
    assert kv_params.prefill_answer_params(answer) is None


# --- one token for the prefill leg, the client's values for decode -----------------------------


@pytest.mark.parametrize(
    ("api", "client", "expected"),
    [
        (Api.COMPLETIONS, {}, {"max_tokens": 1}),
        (Api.COMPLETIONS, {"max_tokens": 500, "min_tokens": 9}, {"max_tokens": 1, "min_tokens": 1}),
        (Api.COMPLETIONS, {"max_completion_tokens": 5}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (Api.COMPLETIONS, {"n": 4, "best_of": 8}, {"max_tokens": 1, "n": 1}),
        (Api.CHAT, {}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (Api.CHAT, {"max_completion_tokens": 500}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (Api.CHAT, {"stream": True, "stream_options": {}}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (Api.MESSAGES, {"max_tokens": 1024}, {"max_tokens": 1}),
        (Api.RESPONSES, {}, {"max_output_tokens": 1}),
        (Api.RESPONSES, {"max_output_tokens": 99, "store": True}, {"max_output_tokens": 1, "store": False}),
        (Api.GENERATE, {}, {"sampling_params": {"max_tokens": 1}}),
        (
            Api.GENERATE,
            {"sampling_params": {"max_tokens": 64, "min_tokens": 4, "n": 2, "temperature": 0.5}},
            {"sampling_params": {"max_tokens": 1, "min_tokens": 1, "n": 1, "temperature": 0.5}},
        ),
    ],
)
def test_prefill_leg_asks_for_one_token(api: Api, client: dict[str, Any], expected: dict[str, Any]) -> None:
    body = {"model": "m", "tools": [{"x": 1}], **client}
    before = copy.deepcopy(body)
    sent = json.loads(kv_params.prefill_body(api, body, {_KEY: _PULL}))
    assert sent == {"model": "m", "tools": [{"x": 1}], "stream": False, _KEY: _PULL, **expected}
    assert body == before


@given(_BODIES, st.sampled_from(Api), st.integers(0, 3))
def test_the_decode_body_is_the_clients_bytes_with_one_member_more(
    body: dict[str, Any], api: Api, indent: int
) -> None:
    raw = json.dumps(body, indent=indent or None, ensure_ascii=bool(indent % 2)).encode(
        "utf-8", "surrogatepass"
    )
    kv_params.prefill_body(api, body, {_KEY: _PULL})
    decode = kv_params.with_params(raw, _PULL)
    assert decode is not None
    assert json.loads(decode) == {_KEY: _PULL, **json.loads(raw)}
    at = decode.index(b'"' + _KEY.encode())
    inserted = len(decode) - len(raw)
    assert decode[:at] + decode[at + inserted :] == raw


@given(_BODIES, st.sampled_from(Api))
def test_the_prefill_body_differs_in_the_named_fields_only(body: dict[str, Any], api: Api) -> None:
    sent = json.loads(kv_params.prefill_body(api, body, {_KEY: _PULL}))
    changed = {key for key in {*sent, *body} if sent.get(key, ...) != body.get(key, ...)}
    assert changed <= {_KEY, "stream", "stream_options", "store", "best_of", "n", "sampling_params"} | {
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "max_output_tokens",
    }
    assert sent[_KEY] == _PULL
    assert sent["stream"] is False


@pytest.mark.parametrize("raw", [b"", b" ", b"[]", b'"x"', b"null", b"prompt", b"\xef\xbb\xbf{}"])
def test_what_is_not_an_object_is_not_spliced(raw: bytes) -> None:
    assert kv_params.with_params(raw, _PULL) is None


def test_an_empty_object_gets_no_comma() -> None:
    assert json.loads(kv_params.with_params(b" {\n } ", _PULL) or b"") == {_KEY: _PULL}


# --- a client's own kv_transfer_params ----------------------------------------------------------


def _hidden(spelling: str) -> bytes:
    return (
        b'{"prompt":"p","' + spelling.encode() + b'":{"remote_kv_source":{"remote_host":"169.254.169.254"}}}'
    )


@pytest.mark.parametrize(
    "raw",
    [
        _hidden(_KEY),
        _hidden(r"kv_transfer\u005fparams"),
        _hidden(r"\u006bv_transfer_params"),
        _hidden("".join(f"\\u{ord(char):04x}" for char in _KEY)),
        _hidden("".join(f"\\u{ord(char):04X}" for char in _KEY)),
        _hidden(_KEY).decode().encode("utf-16-le"),
        _hidden(_KEY).decode().encode("utf-16"),
        _hidden(_KEY).decode().encode("utf-32-be"),
        b'{"kv_transfer_params":{"a":1},"prompt":"p","kv_transfer_params":{"b":1}}',
        b'{"prompt":"p","sampling_params":{"extra_args":{"kv_transfer_params":{"a":1}}},"l":[[{"kv_transfer_params":1}]]}',
    ],
)
def test_is_removed_however_it_is_written(raw: bytes) -> None:
    cleaned = kv_params.without_client_params(raw)
    assert _KEY not in json.dumps(json.loads(cleaned))
    assert json.loads(cleaned)["prompt"] == "p"


@given(st.text(), st.text())
def test_a_prompt_that_only_talks_about_it_is_not_touched(before: str, after: str) -> None:
    raw = json.dumps({"prompt": f"{before}{_KEY}{after}"}).encode()
    assert kv_params.without_client_params(raw) is raw


@given(_BODIES.filter(lambda body: _without_key(body) == body))
def test_an_innocent_body_is_the_same_object(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    assert kv_params.without_client_params(raw) is raw


@given(_BODIES, _JSON)
def test_removal_leaves_every_other_value_exact(body: dict[str, Any], value: Any) -> None:
    raw = json.dumps({**body, _KEY: value}).encode()
    expected = _without_key(body)
    assert json.loads(kv_params.without_client_params(raw)) == expected


@pytest.mark.parametrize("raw", [b'{"kv_transfer_params":', b"\0", b"[" * 100_000 + b'"kv_transfer_params"'])
def test_suspicious_and_not_json_is_the_clients_fault(raw: bytes) -> None:
    with pytest.raises(BodyInvalid):
        kv_params.without_client_params(raw)


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kv_params, "MAX_VALUES", 1_000)
    return 1_000


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"a":1},', b'"ab",', b"7,"])
def test_more_values_than_can_be_looked_through_are_refused(few_values: int, piece: bytes) -> None:
    raw = b'{"kv_transfer_params":1,"x":[' + piece * few_values + b"0]}"
    with pytest.raises(BodyTooLarge, match="1,000 values"):
        kv_params.without_client_params(raw)
    assert kv_params.parse_object(raw) is None


def test_a_body_of_many_values_that_names_nothing_of_ours_passes_unread(few_values: int) -> None:
    raw = b'{"prompt":[' + b"7," * (2 * few_values) + b"7]}"
    assert kv_params.without_client_params(raw) is raw


def test_fewer_values_than_the_limit_are_looked_through(few_values: int) -> None:
    raw = b'{"kv_transfer_params":1,"prompt":[' + b"7," * (few_values - 10) + b"7]}"
    assert json.loads(kv_params.without_client_params(raw)) == {"prompt": [7] * (few_values - 9)}


# --- ids, routes, what cannot be split ----------------------------------------------------------


def test_a_uuid4_decision_id_is_the_request_id() -> None:
    decision_id = str(uuid.uuid4())
    assert kv_params.request_id_or_fresh(decision_id.upper()) == decision_id


@pytest.mark.parametrize("decision_id", [None, "", "x", str(uuid.uuid1()), "a" * 10_000])
def test_any_other_decision_id_gives_a_fresh_uuid4(decision_id: str | None) -> None:
    first, second = (uuid.UUID(kv_params.request_id_or_fresh(decision_id)) for _ in range(2))
    assert first != second
    assert first.version == second.version == 4


@pytest.mark.parametrize("api", Api)
def test_generating_routes(api: Api) -> None:
    assert kv_params.api_of("POST", api.value) is api
    assert kv_params.api_of("POST", api.value + "/") is api
    assert kv_params.api_of("GET", api.value) is None
    assert kv_params.api_of("POST", "/x" + api.value) is None


@pytest.mark.parametrize(
    ("api", "body", "reason"),
    [
        (Api.COMPLETIONS, {"prompt_logprobs": 5}, "prompt_logprobs"),
        (Api.CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (Api.CHAT, {"echo": True}, None),
        (Api.CHAT, {"use_beam_search": True}, "beam_search"),
        (Api.GENERATE, {"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        (Api.RESPONSES, {"background": True}, "stored_response"),
        (Api.RESPONSES, {"previous_response_id": "resp_1"}, "stored_response"),
        (Api.CHAT, {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": None}, None),
    ],
)
def test_requests_that_one_engine_must_serve(api: Api, body: dict[str, Any], reason: str | None) -> None:
    assert kv_params.unsplittable(api, body) == reason


@pytest.mark.parametrize("raw", [b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e400}', b"[1]", b"{", b"\xff"])
def test_what_cannot_be_written_again_is_not_split(raw: bytes) -> None:
    assert kv_params.parse_object(raw) is None


def test_lone_surrogates_and_huge_integers_survive() -> None:
    body = kv_params.parse_object(b'{"prompt":"\\ud800","seed":36893488147419103232}')
    assert body is not None
    sent = json.loads(kv_params.prefill_body(Api.CHAT, body, {}))
    assert (sent["prompt"], sent["seed"]) == ("\ud800", 36893488147419103232)


def _without_key(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_key(item) for key, item in value.items() if key != _KEY}
    return [_without_key(item) for item in value] if isinstance(value, list) else value
