"""Answers follow from the KV bytes: equal everywhere, wrong where the bytes are wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np

from tests.integration.engine.rig import BLOCK, EngineClient, StartEngine, prompt_ids


async def sse(engine: EngineClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a streamed answer; checks the end mark."""
    async with engine.session.post(engine.base + path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_equal_prompts_give_equal_answers_on_every_engine(start_engine: StartEngine) -> None:
    """Also with another hash seed and block size: those are names, not content."""
    first, second = await start_engine(), await start_engine(hash_seed="other", block_size=32)
    prompt = prompt_ids(1000)
    answer = await first.complete(prompt, max_tokens=20)
    assert (await second.complete(prompt, max_tokens=20)).text == answer.text
    assert (await second.complete(prompt_ids(1000, salt=1), max_tokens=20)).text != answer.text
    assert answer.report["computed_tokens"] == 1000


async def test_device_hit_computes_only_the_last_block_and_answers_the_same(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    prompt = prompt_ids(64 * BLOCK)
    computed = await engine.complete(prompt)
    hit = await engine.complete(prompt)
    assert hit.text == computed.text
    assert (hit.report["device_hit_tokens"], hit.report["computed_tokens"]) == (63 * BLOCK, BLOCK)
    assert hit.cached_tokens == 63 * BLOCK
    assert hit.report["pull_reason"] is None


async def test_wrong_bytes_in_the_device_tier_give_a_wrong_answer(start_engine: StartEngine) -> None:
    """The oracle of all other tests: KV that is not right cannot stay unseen."""
    engine = await start_engine()
    prompt = prompt_ids(8 * BLOCK)
    right = await engine.complete(prompt, max_tokens=8)
    device = engine.running.engine.parts.memory.device
    device[3] = np.roll(device[3], 1, axis=0)
    assert (await engine.complete(prompt, max_tokens=8)).text != right.text


async def test_text_and_its_token_ids_are_one_prompt(start_engine: StartEngine) -> None:
    engine = await start_engine()
    text = "The harbour master wrote down every ship. " * 40
    tokens = (await engine.post("/tokenize", {"prompt": text})).body["tokens"]
    by_text = await engine.complete(text)
    by_ids = await engine.complete(tokens)
    assert by_ids.text == by_text.text
    assert by_ids.report["device_hit_tokens"] == (len(tokens) - 1) // BLOCK * BLOCK > 0


async def test_next_turn_finds_the_blocks_that_the_answer_made(start_engine: StartEngine) -> None:
    """Generated text comes back as the very tokens whose KV was kept."""
    engine = await start_engine()
    messages: list[dict[str, str]] = [{"role": "user", "content": "Tell me about the harbour. " * 20}]
    body = {"model": "m", "messages": messages, "max_tokens": 100}
    first = await engine.post("/v1/chat/completions", body, "turn-1")
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    second = await engine.post("/v1/chat/completions", body | {"messages": messages}, "turn-2")
    before, after = await engine.report("turn-1"), await engine.report("turn-2")
    known = before["prompt_tokens"] + 100 - 1  # the last token of an answer was never computed
    assert after["device_hit_tokens"] == known // BLOCK * BLOCK
    assert second.body["usage"]["prompt_tokens"] == after["prompt_tokens"] > known


async def test_stream_carries_the_same_text_and_usage(start_engine: StartEngine) -> None:
    engine = await start_engine()
    body = {"model": "m", "prompt": prompt_ids(100), "max_tokens": 12}
    whole = await engine.post("/v1/completions", body)
    chunks = await sse(engine, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole.text
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 11 + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 6 * BLOCK}


async def test_chat_stream_opens_with_the_role_and_ends_by_itself(start_engine: StartEngine) -> None:
    engine = await start_engine()
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    whole = await engine.post("/v1/chat/completions", body)
    chunks = await sse(engine, "/v1/chat/completions", body)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == whole.text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert 16 <= whole.body["usage"]["completion_tokens"] < 112


async def test_several_prompts_in_one_call(start_engine: StartEngine) -> None:
    engine = await start_engine()
    prompts = [prompt_ids(50), prompt_ids(50, salt=1)]
    both = await engine.post("/v1/completions", {"model": "m", "prompt": prompts, "max_tokens": 6})
    single = [(await engine.complete(prompt, max_tokens=6)).text for prompt in prompts]
    assert [choice["text"] for choice in both.body["choices"]] == single
    assert both.body["usage"]["prompt_tokens"] == 100
    chunks = await sse(engine, "/v1/completions", {"model": "m", "prompt": prompts, "max_tokens": 6})
    for index, text in enumerate(single):
        mine = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(mine) == text


async def test_salt_separates_caches_but_not_answers(start_engine: StartEngine) -> None:
    engine = await start_engine()
    prompt = prompt_ids(10 * BLOCK)
    plain = await engine.complete(prompt)
    salted = await engine.complete(prompt, cache_salt="tenant-a")
    again = await engine.complete(prompt, cache_salt="tenant-a")
    other = await engine.complete(prompt, cache_salt="tenant-b")
    assert [r.report["device_hit_tokens"] for r in (salted, again, other)] == [0, 9 * BLOCK, 0]
    assert plain.text == salted.text == again.text == other.text


async def test_long_prompts_share_steps_and_all_answers_are_right(start_engine: StartEngine) -> None:
    """Continuous batching: more requests than sequences, prompts over several chunks, mixed with decode."""
    engine = await start_engine(device_tokens=65_536, cpu_tokens=65_536, max_model_len=32_768, max_num_seqs=3)
    prompts = [prompt_ids(tokens, salt) for salt, tokens in enumerate((20_000, 5, 9000, 700, 16_384))]
    alone = [(await engine.complete(prompt, max_tokens=30)).text for prompt in prompts]
    await engine.reset(cpu_too=True)
    together = await asyncio.gather(*(engine.complete(prompt, max_tokens=30) for prompt in prompts))
    assert [reply.text for reply in together] == alone
    assert [reply.report["computed_tokens"] for reply in together] == [len(prompt) for prompt in prompts]
    await engine.quiet()
