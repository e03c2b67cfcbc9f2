"""Flags of the engine's server that change tokens: each changes the text as the engine's does.

The same requests are compared with a real vLLM under these flags in tests/engine/test_server_flags.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epp.core.errors import ConfigError
from epp.plugins.producers import TokenProducerParameters
from epp.request.back_end import TokeniserPlan
from epp.request.engine_flags import EngineFlags
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import ChatPrompt, parse_request
from tests.parity.ours import JSON_HEADERS

DIRECTORY = Path(__file__).resolve().parents[3] / "config" / "tokenizer"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": {}}}


def load(tmp_path: Path, template: str, **flags: Any) -> LocalTokenizer:
    (tmp_path / "tokenizer.json").write_bytes((DIRECTORY / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    return LocalTokenizer.load(tmp_path, flags=EngineFlags(**flags))


def text_of(tokenizer: LocalTokenizer, fields: dict[str, Any], path: str = CHAT) -> str:
    prompt = parse_request(json.dumps({"messages": [USER]} | fields).encode(), path, JSON_HEADERS).prompt
    assert isinstance(prompt, ChatPrompt)
    return tokenizer.prompt_text(prompt)


def test_a_request_wins_over_the_engine_s_default_variables(tmp_path: Path) -> None:
    template = "{{ mode }}|{{ enable_thinking }}"
    defaults = {"mode": "fast", "enable_thinking": True}
    tokenizer = load(tmp_path, template, default_template_kwargs=defaults)
    assert text_of(tokenizer, {}) == "fast|True"
    assert text_of(tokenizer, {"chat_template_kwargs": {"mode": "slow"}}) == "slow|True"
    assert text_of(tokenizer, {"chat_template_kwargs": {"mode": None}}) == "fast|True"
    assert text_of(tokenizer, {"reasoning_effort": "none"}) == "fast|False"
    assert text_of(load(tmp_path, template), {}) == "|"


@pytest.mark.parametrize(("flag", "text"), [("auto", "part"), ("openai", "part"), ("string", "text")])
def test_the_content_format_can_be_set(tmp_path: Path, flag: str, text: str) -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}text{% else %}"
        "{% for p in m.content %}part{% endfor %}{% endif %}{% endfor %}"
    )
    assert text_of(load(tmp_path, template, content_format=flag), {}) == text


@pytest.mark.parametrize(
    ("path", "none"),
    [(CHAT, "none"), ("/v1/messages", {"type": "none"}), ("/v1/responses", "none")],
)
def test_tools_that_may_not_be_called_are_left_out_where_the_engine_does_so(
    tmp_path: Path, path: str, none: object
) -> None:
    template = "{{ 'tools' if tools else 'bare' }}"
    given = {
        CHAT: {"tools": [TOOL]},
        "/v1/messages": {"tools": [{"name": "f", "input_schema": {}}]},
        "/v1/responses": {"tools": [{"type": "function", "name": "f"}], "input": "Hello"},
    }[path]
    keeps, drops = load(tmp_path, template), load(tmp_path, template, drops_unused_tools=True)
    forbidden = given | {"tool_choice": none}
    assert [text_of(keeps, fields, path) for fields in (given, forbidden)] == ["tools", "tools"]
    assert [text_of(drops, fields, path) for fields in (given, forbidden)] == ["tools", "bare"]


@pytest.mark.parametrize(
    ("template", "flag", "text"),
    [
        ("{{ reasoning_effort }}|{{ enable_thinking }}", "auto", "none|False"),
        ("{{ reasoning_effort }}|{{ enable_thinking }}", "medium", "medium|True"),
        # what it renders alike, or refuses, does not switch thinking off
        ("{% if reasoning_effort == 'low' %}brief{% else %}long{% endif %}", "auto", "brief"),
        (
            "{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}",
            "auto",
            "low",
        ),
    ],
)
def test_switched_off_thinking_is_the_effort_that_the_engine_takes_for_it(
    tmp_path: Path, template: str, flag: str, text: str
) -> None:
    tokenizer = load(tmp_path, template, disabled_thinking=flag)
    assert text_of(tokenizer, {"thinking": {"type": "disabled"}}, "/v1/messages") == text


def test_the_client_s_own_switch_stays_beside_disabled_thinking(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{{ reasoning_effort }}|{{ enable_thinking }}")
    fields = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}
    assert text_of(tokenizer, fields, "/v1/messages") == "none|True"


async def test_the_parameters_reach_the_tokeniser() -> None:
    parameters = TokenProducerParameters.model_validate(
        {
            "local": {
                "path": str(DIRECTORY),
                "defaultChatTemplateKwargs": {"x": 1},
                "chatTemplateContentFormat": "string",
                "excludeToolsWhenToolChoiceNone": True,
                "anthropicDisabledThinkingEffort": "low",
            }
        }
    )
    service = TokeniserPlan(parameters, None, 1.0, tuple).build()
    assert service is not None
    assert service._tokenizer._flags == EngineFlags({"x": 1}, "string", True, "low")  # type: ignore[union-attr]
    await service.aclose()


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt"])
def test_a_default_that_no_engine_may_have_is_a_sentence(name: str) -> None:
    parameters = TokenProducerParameters.model_validate(
        {"local": {"path": str(DIRECTORY), "defaultChatTemplateKwargs": {name: 1}}}
    )
    with pytest.raises(ConfigError, match=f"defaultChatTemplateKwargs: {name}"):
        TokeniserPlan(parameters, None, 1.0, tuple).build()
