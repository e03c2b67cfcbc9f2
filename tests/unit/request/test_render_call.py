"""Which render endpoint is asked for a chat of another API, and with what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.request.parse import ChatPrompt, parse_request
from epp.request.render_call import CHAT_PATH, Unwritable, render_call

USER = {"role": "user", "content": "Q"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def call_for(path: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = json.dumps({"model": "client-s", "temperature": 0.5} | fields).encode()
    prompt = parse_request(body, path, {"content-type": "application/json"}).prompt
    assert isinstance(prompt, ChatPrompt)
    asked, rendered = render_call(prompt, "served")
    return asked, json.loads(rendered)


def test_anthropic_messages_are_asked_for_as_a_chat() -> None:
    path, fields = call_for("/v1/messages", max_tokens=9, system="Top.", messages=[USER])
    assert path == CHAT_PATH
    assert fields["messages"] == [{"role": "system", "content": "Top."}, USER]
    assert fields["model"] == "served"


@pytest.mark.parametrize(
    ("messages", "payload"),
    [
        ([USER, {"role": "system", "content": "Late."}, USER], None),
        ([{"role": "user", "content": [{"type": "text", "text": "Look"}, IMAGE]}], "none"),
    ],
)
def test_what_only_their_own_endpoint_does_goes_there(messages: list[Any], payload: str | None) -> None:
    """Where system messages go, and pictures: their places, not their pixels. Sampling stays away."""
    path, fields = call_for("/v1/messages", max_tokens=9, messages=messages, thinking={"type": "adaptive"})
    assert path == "/v1/messages/render"
    assert fields.pop("mm_payload", None) == payload
    assert fields == {
        "messages": messages,
        "thinking": {"type": "adaptive"},
        "max_tokens": 9,
        "model": "served",
    }


def test_pictures_in_responses_are_asked_for_there() -> None:
    parts = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    given = [{"role": "user", "content": parts}]
    path, fields = call_for("/v1/responses", input=given, instructions="I")
    assert path == "/v1/responses/render"
    assert fields == {"input": given, "instructions": "I", "mm_payload": "none", "model": "served"}


def test_parts_of_responses_stay_what_they_are() -> None:
    """A chat's validation refuses them, and another type would be another text: see the billing line."""
    given = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
    assert call_for("/v1/responses", input=given)[0] == "/v1/responses/render"
    assert call_for("/v1/responses", input=[USER])[0] == CHAT_PATH


def test_switched_off_thinking_is_not_asked_for() -> None:
    """The render endpoint of /v1/messages does not probe the template, the server does."""
    with pytest.raises(Unwritable):
        call_for("/v1/messages", max_tokens=9, messages=[USER], thinking={"type": "disabled"})
