"""System messages inside /v1/messages: where the engine puts them, and the tools they change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epp.request.inline_system import refuses_inline_system, with_system_in_front
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import ChatPrompt, parse_request
from tests.parity.families import FAMILIES, TEMPLATES, by_name, write_family

USER = {"role": "user", "content": "Q"}
HEADER = "x-anthropic-billing-header: 1"


def parse(messages: list[Any], **fields: Any) -> tuple[ChatPrompt | None, str | None]:
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": messages} | fields).encode()
    request = parse_request(body, "/v1/messages", {"content-type": "application/json"})
    assert request.prompt is None or isinstance(request.prompt, ChatPrompt)
    return request.prompt, request.no_prompt


def chat(messages: list[Any], **fields: Any) -> ChatPrompt:
    prompt, _ = parse(messages, **fields)
    assert prompt is not None
    return prompt


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def test_texts_stay_where_they_are_until_the_template_is_known() -> None:
    blocks = [{"type": "text", "text": text} for text in (HEADER, "a", "", "b")]
    prompt = chat([USER, system(blocks), system(f"{HEADER}\nx"), system(""), USER, system("c")])
    assert prompt.inline_system
    assert prompt.messages == [USER, system("ab"), USER, system("c")]
    assert not chat([USER], system="top").inline_system


def test_in_front_they_are_one_message_with_the_top_one() -> None:
    prompt = chat([USER, system("a"), USER, system("b")], system="Top.")
    assert with_system_in_front(prompt.messages) == [system("Top.ab"), USER, USER]
    assert with_system_in_front([USER]) == [USER]


def test_the_engine_s_probe() -> None:
    """Loops, macros and filters are known to it; what transformers adds is not, and that refuses."""
    assert not refuses_inline_system(
        "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{% endfor %}"
    )
    first = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    assert refuses_inline_system(first + "{% endif %}{% endfor %}")
    assert refuses_inline_system("{{ strftime_now('%d') }}")
    assert refuses_inline_system("{% generation %}x{% endgeneration %}")
    assert refuses_inline_system("{{ bos_token + 'x' }}")
    assert not refuses_inline_system("{{ bos_token }}")
    assert refuses_inline_system("{{ 1 + 'x' }}"), "an engine would not start with it"


def test_families_of_both_kinds_are_in_the_corpus() -> None:
    refusing = {
        family.name: refuses_inline_system((TEMPLATES / f"{family.name}.jinja").read_text())
        for family in FAMILIES
    }
    assert set(refusing.values()) == {True, False}


@pytest.mark.parametrize("in_front", [True, False])
def test_the_template_decides(tmp_path: Path, in_front: bool) -> None:
    write_family(by_name("chatml"), tmp_path)
    guard = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}" * in_front
    source = "{% for m in messages %}" + guard + "[{{ m.role }}]{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    prompt = chat([USER, system("now"), USER], system="Top.")
    text = LocalTokenizer.load(tmp_path).prompt_text(prompt)
    assert text == ("[system]Top.now[user]Q[user]Q" if in_front else "[system]Top.[user]Q[system]now[user]Q")


def test_a_template_for_tools_that_refuses_decides_for_all_chats(tmp_path: Path) -> None:
    write_family(by_name("chatml"), tmp_path)
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ raise_exception('no') }}")
    text = LocalTokenizer.load(tmp_path).prompt_text(chat([USER, system("now")]))
    assert text == "[system]now[user]Q"


# ---- tools -----------------------------------------------------------------------------------------


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}} | more


def added(name: str) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}


def removed(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


def defined(given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": given}}


def names(prompt: ChatPrompt) -> list[str]:
    assert prompt.tools is not None
    return [tool["function"]["name"] for tool in prompt.tools]


def test_tools_are_those_at_the_end_of_the_conversation() -> None:
    tools = [tool("a"), tool("b", defer_loading=True), tool("c")]
    changes = [added("b"), removed("a"), defined(tool("d", description="new")), removed("c"), added("c")]
    prompt = chat([USER, system(changes)], tools=tools)
    assert names(prompt) == ["b", "c", "d"]
    assert prompt.tools is not None
    assert prompt.tools[0]["function"] == {"name": "b", "description": None, "parameters": {"type": "object"}}
    assert prompt.tools[2]["function"]["description"] == "new"
    assert prompt.messages == [USER], "the change itself is no text"
    assert chat([USER, system([defined(tool("d"))])]).tools is not None


def test_without_changes_a_tool_may_be_there_twice_and_with_them_the_last_counts() -> None:
    tools = [tool("a", description="1"), tool("a", description="2")]
    assert names(chat([USER], tools=tools)) == ["a", "a"]
    prompt = chat([USER, system([added("a")])], tools=tools)
    assert prompt.tools is not None
    assert [tool["function"]["description"] for tool in prompt.tools] == ["2"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (system([added("x")]), "tools_shape"),
        (system([{"type": "tool_addition"}]), "tools_shape"),
        (system([defined({"name": "x"})]), "tools_shape"),
        (
            system([{"type": "tool_removal", "tool": {"type": "tool_definition", "definition": tool("a")}}]),
            "tools_shape",
        ),
        ({"role": "user", "content": [added("a")]}, "messages_shape"),
        (system([{"type": "image"}]), "messages_shape"),
    ],
)
def test_changes_that_the_engine_refuses(message: dict[str, Any], reason: str) -> None:
    assert parse([USER, message], tools=[tool("a")]) == (None, reason)
