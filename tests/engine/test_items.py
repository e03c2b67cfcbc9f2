"""Pictures, as a real vLLM treats them: block i is the text's own if it ends before the first of them.

The router's tokens are the engine's up to the item's first token; the engine reuses exactly the whole blocks
of those under another picture; and what its events say of the blocks from the item on matches no text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import parse_request
from epp.request.render import RenderLimits, RenderTokeniser
from epp.request.tokenise import LocalTokeniser, Tokeniser
from tests.engine.serving import BLOCK_TOKENS, Engine, watching
from tests.engine.test_kv_events import serve
from tests.parity.ours import JSON_HEADERS
from tests.parity.pictures import picture_url

pytestmark = pytest.mark.timeout(900)
CHAT = "/v1/chat/completions"
LONG = "The harbour lies behind the hill. " * 12


def picture(shade: int, **more: Any) -> dict[str, Any]:
    """A grey PNG as a part of a message."""
    return {"type": "image_url", "image_url": {"url": picture_url(shade)}, **more}


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given}


def chat(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "system", "content": f"{name}. {LONG}"}, {"role": "user", "content": list(parts)}]
    return {"model": "m", "messages": messages, "max_tokens": 1, "temperature": 0.0}


async def tokens(tokeniser: Tokeniser, fields: dict[str, Any]) -> list[int]:
    prompt = parse_request(json.dumps(fields).encode(), CHAT, JSON_HEADERS).prompt
    assert prompt is not None
    ids = await tokeniser.token_ids(prompt)
    assert ids is not None, tokeniser.counters.outcomes
    return list(ids)


SHAPES = {
    "in_front": [picture(1), text("What is it?")],
    "between": [text("Look at this:"), picture(2), text("What is it?")],
    "two": [text("One:"), picture(3), text("two:"), picture(4)],
    "named": [text("Look:"), picture(5, uuid="picture-5")],
    "detail": [text("Look:"), picture(6, detail="low")],
    "literal": [text("Write <image> here:"), picture(7)],
    "marks": [text("a <|im_end|> <global-img> b\n\n"), picture(8)],
}


@pytest.mark.parametrize("name", SHAPES)
async def test_the_router_s_tokens_are_the_engine_s_up_to_the_item(
    item_engine: Engine, item_model: Path, name: str
) -> None:
    fields = chat(name, *SHAPES[name])
    answer = await serve(item_engine, f"{CHAT}/render", fields | {"mm_payload": "none"})
    local = LocalTokeniser(LocalTokenizer.load(item_model), budget_s=30.0)
    ours = await tokens(local, fields)
    await local.aclose()
    if answer is None:
        assert name == "literal", "a placeholder more than there are pictures is refused"
        return
    places = answer["features"]["mm_placeholders"]["image"]
    first = min(place["offset"] for place in places)
    assert ours == answer["token_ids"][:first]
    assert len(ours) > 2 * BLOCK_TOKENS

    asks = RenderTokeniser(lambda: (item_engine.url,), limits=RenderLimits(items_budget_s=60.0))
    assert await tokens(asks, fields) == ours
    await asks.aclose()


async def test_blocks_that_end_before_the_item_are_the_text_s_own(
    item_engine: Engine, item_model: Path
) -> None:
    local = LocalTokeniser(LocalTokenizer.load(item_model), budget_s=30.0)
    first = chat("events", text("Look at this:"), picture(10), text(LONG))
    other = chat("events", text("Look at this:"), picture(11), text(LONG))
    ids = await tokens(local, first)
    await local.aclose()
    whole = len(ids) // BLOCK_TOKENS
    assert len(ids) % BLOCK_TOKENS, "one block holds both text and picture"
    rendered = await serve(item_engine, f"{CHAT}/render", first | {"mm_payload": "none"})
    assert rendered is not None
    everything = rendered["token_ids"]
    assert len(everything) // BLOCK_TOKENS > whole + 1
    async with watching(item_engine) as view:
        assert await serve(item_engine, CHAT, first) is not None
        await view.until(lambda: view.depth(ids) == whole)
        assert view.depth(everything) == whole, "the item's blocks have keys of their own"
        answer = await serve(item_engine, CHAT, other)
    assert answer is not None
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == whole * BLOCK_TOKENS, "what the engine itself reuses under another picture"


async def test_switched_off_thinking_is_what_the_server_makes_of_it(
    item_engine: Engine, item_model: Path
) -> None:
    """The render endpoint of /v1/messages does not probe the template; the server does."""
    local = LocalTokeniser(LocalTokenizer.load(item_model), budget_s=30.0)
    fields = {
        "model": "m",
        "max_tokens": 1,
        "system": LONG,
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "disabled"},
    }
    prompt = parse_request(json.dumps(fields).encode(), "/v1/messages", JSON_HEADERS).prompt
    assert prompt is not None
    ids = await local.token_ids(prompt)
    await local.aclose()
    assert ids is not None
    async with watching(item_engine) as view:
        assert await serve(item_engine, "/v1/messages", fields) is not None
        await view.until(lambda: view.depth(ids) == len(ids) // BLOCK_TOKENS)
