"""S-B09: the engine refuses what vLLM refuses, with an error a client of vLLM understands."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.engine.rig import EngineClient, prompt_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SOURCE = {"kv_request_id": "x", "remote_host": "127.0.0.1", "remote_port": 7777}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"content": "no role"}]}, "rendered"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "rendered"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
    (CHAT, {"messages": HELLO, "tools": {}}, "tools"),
    (TEXT, {"prompt": ""}, "empty"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "empty"),
    (TEXT, {"prompt": ["fine", ""]}, "empty"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": {"text": "x"}}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [1, True]}, "prompt"),
    (TEXT, {"prompt": [999_999]}, "vocabulary"),
    (TEXT, {"prompt": [-1]}, "vocabulary"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 8192}, "maximum context length"),
    (TEXT, {"prompt": prompt_ids(8192), "max_tokens": 1}, "maximum context length"),
    (TEXT, {"prompt": "x", "temperature": -0.1}, "temperature"),
    (TEXT, {"prompt": "x", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "x", "n": 0}, "n must"),
    (TEXT, {"prompt": "x", "stream": "yes"}, "stream"),
    (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream"),
    (TEXT, {"prompt": "x", "cache_salt": ""}, "cache_salt"),
    (TEXT, {"prompt": "x", "kv_transfer_params": []}, "kv_transfer_params"),
    (
        TEXT,
        {"prompt": "x", "kv_transfer_params": {"remote_prefiller": SOURCE, "remote_kv_source": SOURCE}},
        "exclude each other",
    ),
    (
        TEXT,
        {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}},
        "exclude each other",
    ),
]


async def requests_seen(engine: EngineClient) -> float:
    return await engine.counter("vllm:prefix_cache_queries_total")


async def test_every_refusal_is_a_400_that_names_the_place(shared_engine: EngineClient) -> None:
    engine = shared_engine
    before = await requests_seen(engine)
    for path, body, word in REFUSED:
        reply = await engine.post(path, {"model": "m"} | body)
        error = reply.body["error"]
        assert (reply.status, error["code"], error["type"]) == (400, 400, "BadRequestError"), body
        assert word in f"{error['message']} {error['param']}", body
    assert await requests_seen(engine) == before


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_unknown_model_is_a_404(shared_engine: EngineClient, path: str) -> None:
    engine = shared_engine
    reply = await engine.post(path, {"model": "other", "prompt": "x", "messages": HELLO})
    assert (reply.status, reply.body["error"]["type"]) == (404, "NotFoundError")
    assert reply.body["error"]["message"] == "The model `other` does not exist."


async def test_bodies_that_are_no_json_object(shared_engine: EngineClient) -> None:
    engine = shared_engine
    bodies = (b"{", b'{"a": 1,}', b"\xff\xfe{}", b"[]", b'"x"', b"[" * 100_000, b"", b'{"prompt": "\xe9"}')
    for body in bodies:
        headers = {"content-type": "application/json"}
        async with engine.session.post(engine.base + TEXT, data=body, headers=headers) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (400, 400, "Bad Request"), body[:20]
    async with engine.session.post(
        engine.base + TEXT, data=b"{}", headers={"content-type": "text/plain"}
    ) as r:
        assert r.status == 400
    assert (await engine.complete("still fine")).status == 200


async def test_harmless_fields_are_ignored(shared_engine: EngineClient) -> None:
    engine = shared_engine
    plain = await engine.complete("hello there")
    decorated = await engine.complete(
        "hello there",
        prompt_logprobs=None,
        logprobs=3,
        seed=1,
        temperature=0.7,
        top_p=1,
        n=1,
        user="u",
        unknown={},
    )
    assert decorated.text == plain.text


async def test_unknown_paths_and_requests_have_the_same_error_shape(shared_engine: EngineClient) -> None:
    engine = shared_engine
    for path in ("/v1/nothing", "/debug/requests/never"):
        async with engine.session.get(engine.base + path) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == 404


async def test_misspelt_fault_is_refused_and_changes_nothing(shared_engine: EngineClient) -> None:
    engine = shared_engine
    for body in (
        {"hold_replays": True},
        {"hold_replay": "yes"},
        {"hold_after_chunks": -1, "hold_replay": True},
    ):
        assert (await engine.post("/faults", body)).status == 400
    async with engine.session.get(f"{engine.base}/faults") as response:
        state = await response.json()
    assert (state["hold_replay"], state["hold_after_chunks"]) == (False, None)
