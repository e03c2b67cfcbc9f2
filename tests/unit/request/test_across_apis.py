"""A conversation that goes on at another API is not encoded again: texts are remembered, not requests."""

from __future__ import annotations

import json
from array import array
from typing import Any

from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import parse_request
from epp.request.tokenise import LocalTokeniser


async def ids_of(service: LocalTokeniser, path: str, fields: dict[str, Any]) -> array[int]:
    prompt = parse_request(json.dumps(fields).encode(), path, {}).prompt
    assert prompt is not None
    ids = await service.token_ids(prompt)
    assert isinstance(ids, array)
    return ids


async def test_from_chat_to_responses_to_messages(tokenizer: LocalTokenizer) -> None:
    service = LocalTokeniser(tokenizer, workers=1, budget_s=30.0)
    turns = [
        {"role": "assistant" if number % 2 else "user", "content": f"turn {number}: " + "some words " * 200}
        for number in range(12)
    ]
    question = {"role": "user", "content": "And then? " * 30}
    await ids_of(service, "/v1/chat/completions", {"messages": turns[:-1]})
    encoded = service.counters.encoded_tokens
    responses = await ids_of(service, "/v1/responses", {"input": [*turns, question]})
    new = service.counters.encoded_tokens - encoded
    assert 0 < new < 900 < len(responses) // 4  # the last answer and the question
    encoded += new
    messages = await ids_of(service, "/v1/messages", {"messages": [*turns, question], "max_tokens": 1})
    assert service.counters.encoded_tokens - encoded < 10
    assert messages[-len(messages) // 2 :] == responses[-len(messages) // 2 :]  # it is one text
    await service.aclose()
