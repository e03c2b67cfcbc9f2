"""Pictures and the like: what stands in front of the first is matched, and nothing from there on.

The engine's own word on the same kind of requests: tests/engine/test_items.py.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from epp.request.items import ItemPlaces, shown_item
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import ChatPrompt, parse_request
from epp.request.tokenise import LocalTokeniser
from tests.parity.families import by_name, write_family
from tests.parity.ours import JSON_HEADERS

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
BEFORE = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "A long text " * 40}]


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given}


def write_model(directory: Path, model_type: str, family: str = "parts") -> LocalTokenizer:
    write_family(by_name(family), directory)
    placeholder = LocalTokenizer.load(directory).encode("<|image_pad|>", False)[0]
    config = {"model_type": model_type, "image_token_id": placeholder}
    (directory / "config.json").write_text(json.dumps(config))
    return LocalTokenizer.load(directory)


async def say(tokenizer: LocalTokenizer, parts: list[Any], **fields: Any) -> tuple[list[int] | None, str]:
    """The router's tokens of a chat whose last message has `parts`, and the outcome."""
    messages = [*BEFORE, {"role": "user", "content": parts}]
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    prompt = parse_request(body, "/v1/chat/completions", JSON_HEADERS).prompt
    assert prompt is not None
    service = LocalTokeniser(tokenizer, budget_s=30.0)
    ids = await service.token_ids(prompt)
    assert service.token_ids_at_once(prompt) == ids
    (outcome,) = service.counters.outcomes.items()
    assert outcome[1] == 2, "on the loop and in a thread alike"
    await service.aclose()
    return None if ids is None else list(ids), next(iter(service.counters.outcomes))


async def test_the_text_in_front_of_a_picture_is_matched_and_no_token_more(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path, "qwen2_vl")
    ids, outcome = await say(tokenizer, [text("Look at this:"), IMAGE, text("What is it?")])
    expected = tokenizer.render_chat([*BEFORE, {"role": "user", "content": "Look at this: "}])
    expected = expected.partition("<|im_end|>\n<|im_start|>assistant")[0]
    assert (ids, outcome) == (tokenizer.encode(expected, False), "prefix")


async def test_two_requests_with_other_pictures_share_what_is_in_front(tmp_path: Path) -> None:
    """Also where one of them has its uuid: it says what the item is, not where it stands."""
    tokenizer = write_model(tmp_path, "qwen2_vl")
    other = {"type": "image_url", "image_url": {"url": "http://x/y.png"}, "uuid": "picture-1"}
    first = await say(tokenizer, [text("Look:"), IMAGE])
    assert first == await say(tokenizer, [text("Look:"), other, text("a later text")])
    assert first[0] != (await say(tokenizer, [text("See:"), IMAGE]))[0]


async def test_a_placeholder_that_the_client_wrote_ends_what_is_certain(tmp_path: Path) -> None:
    """The engine puts its item at the first placeholder it finds."""
    tokenizer = write_model(tmp_path, "qwen2_vl")
    ids, _ = await say(tokenizer, [text("Say <|image_pad|> twice"), IMAGE])
    assert ids is not None
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nSay ")


@pytest.mark.parametrize(
    ("model_type", "family", "parts", "outcome"),
    [
        ("paligemma", "parts", [text("a"), IMAGE], "multimodal_model"),  # items at the very start
        ("gemma3", "parts", [text("a"), IMAGE], "multimodal_model"),  # merges line ends
        ("qwen2_vl", "parts", [text("a"), SOUND], "multimodal_model"),
        ("qwen2_vl", "parts", [text("a"), IMAGE, SOUND], "multimodal_model"),
        ("qwen2_vl", "chatml", [text("a"), IMAGE], "multimodal_text"),  # placeholders in front of texts
    ],
)
async def test_what_cannot_be_shown_is_no_match_by_name(
    tmp_path: Path, model_type: str, family: str, parts: list[Any], outcome: str
) -> None:
    tokenizer = write_model(tmp_path, model_type, family)
    assert await say(tokenizer, parts) == (None, outcome)


async def test_a_template_that_leaves_the_item_out_is_no_match(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2_vl")
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    tokenizer = LocalTokenizer.load(tmp_path)
    assert await say(tokenizer, [text("a"), IMAGE]) == (None, "multimodal_place")


async def test_without_the_model_s_configuration_there_is_no_match(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2_vl")
    (tmp_path / "config.json").unlink()
    assert await say(LocalTokenizer.load(tmp_path), [IMAGE]) == (None, "multimodal_model")


async def test_chats_without_items_are_whole_for_the_same_model(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path, "qwen2_vl")
    ids, outcome = await say(tokenizer, [text("plain")])
    rendered = tokenizer.render_chat([*BEFORE, {"role": "user", "content": "plain"}])
    assert (ids, outcome) == (tokenizer.encode(rendered, False), "encoded")


def test_a_template_sees_an_item_s_kind_and_what_the_engine_does_not_read() -> None:
    assert shown_item(IMAGE | {"detail": "low", "uuid": "1"}) == {"type": "image", "detail": "low"}
    assert shown_item(SOUND) == {"type": "audio"}


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "llava"}, {"model_type": ["llava"], "image_token_id": 1}]
)
def test_a_model_without_placeholders_admits_nothing(config: dict[str, Any]) -> None:
    assert not ItemPlaces(config).admits(frozenset(("image",)))


def test_the_first_placeholder_of_any_kind_ends_the_prefix() -> None:
    places = ItemPlaces({"model_type": "qwen2_vl", "image_token_id": 7, "video_token_id": 8})
    assert places.tokens_before(array("I", [1, 2, 8, 3, 7])) == array("I", [1, 2])
    assert places.tokens_before(array("I", [1, 2, 3])) is None


# ---- the same in other APIs ------------------------------------------------------------------------

URL = "data:image/png;base64,AAAA"
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


async def say_by(tokenizer: LocalTokenizer, path: str, **fields: Any) -> tuple[str | None, str]:
    """The router's text in front of the first picture, and the outcome."""
    body = json.dumps({"model": "m", "max_tokens": 9} | fields).encode()
    prompt = parse_request(body, path, JSON_HEADERS).prompt
    assert prompt is not None
    service = LocalTokeniser(tokenizer, budget_s=30.0)
    ids = await service.token_ids(prompt)
    await service.aclose()
    return None if ids is None else tokenizer.decode(list(ids)), next(iter(service.counters.outcomes))


async def test_pictures_in_anthropic_messages(tmp_path: Path) -> None:
    """A picture in front of which there is text, one that a tool gave, and one that is no picture."""
    tokenizer = write_model(tmp_path, "qwen2_vl")
    ask = [text("Look:"), BLOCK, text("What is it?")]
    said = await say_by(tokenizer, "/v1/messages", system="Top.", messages=[{"role": "user", "content": ask}])
    assert said == ("<|no_documents|><|im_start|>system\nTop.<|im_end|>\n<|im_start|>user\nLook: ", "prefix")
    empty = {"type": "image", "source": {}}
    chat = [{"role": "user", "content": [empty, text("only text")]}]
    assert (await say_by(tokenizer, "/v1/messages", messages=chat))[1] == "encoded"


async def test_a_tool_s_picture_is_a_message_of_its_own_behind_the_result(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path, "qwen2_vl")
    url = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    for picture in (BLOCK, url):
        content = [picture, text("Here:")]
        result = {"type": "tool_result", "tool_use_id": "t", "content": content}
        chat = [{"role": "user", "content": "Show"}, {"role": "user", "content": [result]}]
        shown, outcome = await say_by(tokenizer, "/v1/messages", messages=chat)
        assert outcome == "prefix"
        assert shown is not None
        assert "Here:" in shown
        assert shown.endswith("<|im_start|>user\n")
    nothing = {"type": "image", "source": {"type": "url"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [nothing]}
    chat = [{"role": "user", "content": [result]}]
    assert (await say_by(tokenizer, "/v1/messages", messages=chat))[1] == "encoded"


async def test_pictures_in_responses(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path, "qwen2_vl")
    image = {"type": "input_image", "image_url": URL}
    parts = [{"type": "input_text", "text": "Look:"}, image, {"type": "input_text", "text": "What?"}]
    said = await say_by(tokenizer, "/v1/responses", input=[{"role": "user", "content": parts}])
    start = "<|no_documents|><|im_start|>system\nAn assistant with eyes.<|im_end|>\n"
    assert said == (f"{start}<|im_start|>user\nLook: ", "prefix")
    output = {"type": "function_call_output", "call_id": "c", "output": [image]}
    assert (await say_by(tokenizer, "/v1/responses", input=[*BEFORE, output]))[1] == "prefix"


def test_a_template_sees_the_detail_that_responses_have_by_default() -> None:
    body = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}
    prompt = parse_request(json.dumps(body).encode(), "/v1/responses", JSON_HEADERS).prompt
    assert isinstance(prompt, ChatPrompt)
    assert shown_item(prompt.messages[0]["content"][0]) == {"type": "image", "detail": "auto"}
