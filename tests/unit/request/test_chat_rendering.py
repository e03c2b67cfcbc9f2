"""Chats become the text that the engine renders: expected texts are written out, not computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.request.chat import Unrenderable
from epp.request.chat_template import ChatTemplate
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.prompts import ChatPrompt

USER = {"role": "user", "content": "Hello"}
CONTINUE: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
DEEP = "[" * 100_000 + "]" * 100_000
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def rendered(
    template: ChatTemplate,
    messages: list[Any],
    tools: list[Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    prompt = ChatPrompt(messages, tools, add_generation_prompt, continue_final_message)
    return template.render(prompt, variables, tools)


def test_roles_and_generation_prompt(tokenizer: LocalTokenizer) -> None:
    messages = [{"role": "system", "content": "Be short."}, USER, {"role": "assistant", "content": "Hi"}]
    expected = "<|bos|><|system|>Be short.<|end|><|user|>Hello<|end|><|assistant|>Hi<|end|>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == expected
    assert tokenizer.render_chat(messages) == expected + "<|assistant|>"


def test_chat_has_exactly_one_begin_token(tokenizer: LocalTokenizer) -> None:
    """S-C15: the template writes it, so encoding must not add another."""
    ids = tokenizer.encode(tokenizer.render_chat([USER]), add_special_tokens=False)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(0) == 1


def test_tools_are_rendered_as_the_engine_dumps_them(tokenizer: LocalTokenizer) -> None:
    """S-B03: known keys first with their defaults, the client's order inside `parameters`."""
    text = tokenizer.render_chat([USER], [WEATHER], add_generation_prompt=False)
    assert text == (
        '<|bos|><|tools|>\n{"type": "function", "function": {"name": "weather", "description": null, '
        '"parameters": {"type": "object"}}}<|end|><|user|>Hello<|end|>'
    )
    reordered = {"function": {"parameters": {"type": "object"}, "name": "weather"}, "type": "function"}
    assert tokenizer.render_chat([USER], [reordered], add_generation_prompt=False) == text
    other = {"type": "function", "function": {"name": "news", "parameters": {"type": "object"}}}
    assert tokenizer.render_chat([USER], [other], add_generation_prompt=False) != text


def test_tool_calls_and_results(tokenizer: LocalTokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
    ]
    assert tokenizer.render_chat(messages) == (
        '<|bos|><|user|>Hello<|end|><|assistant|><|call|>weather {"city": "Ulm"}<|end|>'
        "<|tool|>dry<|end|><|assistant|>"
    )


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_empty_tool_arguments_are_an_empty_object(tokenizer: LocalTokenizer, arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    assert "<|call|>f {}<|end|>" in tokenizer.render_chat(messages)


@pytest.mark.parametrize("content", ["", None, []])
def test_empty_contents_render_alike_and_do_not_raise(tokenizer: LocalTokenizer, content: object) -> None:
    """S-B12: "", null, [] and a missing content."""
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": content}, USER]
    expected = "<|bos|><|user|>Hello<|end|><|assistant|><|end|><|user|>Hello<|end|><|assistant|>"
    assert tokenizer.render_chat(messages) == expected
    del messages[1]["content"]
    assert tokenizer.render_chat(messages) == expected


def test_text_parts_are_joined_by_line_ends(tokenizer: LocalTokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|bos|><|user|>one\ntwo<|end|>"


def test_a_template_that_walks_parts_gets_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m['content'] %}"
        "[{{ p['type'] }}:{{ p.text }}]"
        "{% endfor %}{% endfor %}"
    )
    assert template.content_format == "openai"
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert rendered(template, [{"role": "user", "content": parts}]) == "[text:one][text:two]"
    assert rendered(template, [{"role": "user", "content": "plain"}]) == "[text:plain]"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "audio"}])
def test_multimodal_parts_have_no_text(tokenizer: LocalTokenizer, part: dict[str, object]) -> None:
    with pytest.raises(Unrenderable, match="multimodal_part"):
        tokenizer.render_chat([{"role": "user", "content": [part]}])


def test_reasoning_reaches_the_template_under_both_names() -> None:
    template = ChatTemplate("{{ messages[0].reasoning }}|{{ messages[0].reasoning_content }}")
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "x", name: "because"}
        assert rendered(template, [message]) == "because|because"


def test_template_kwargs_reach_the_template() -> None:
    template = ChatTemplate("{% if enable_thinking %}think{% else %}answer{% endif %}")
    assert rendered(template, [USER], enable_thinking=True) == "think"
    assert rendered(template, [USER]) == "answer"


@pytest.mark.parametrize(
    ("add_generation_prompt", "continue_final_message", "expected"),
    [
        (False, False, "<|bos|><|user|>Hello<|end|><|assistant|>Once <|end|>"),
        (True, False, "<|bos|><|user|>Hello<|end|><|assistant|>Once <|end|><|assistant|>"),
        (False, True, "<|bos|><|user|>Hello<|end|><|assistant|>Once "),
    ],
)
def test_end_of_the_prompt(
    tokenizer: LocalTokenizer, add_generation_prompt: bool, continue_final_message: bool, expected: str
) -> None:
    """S-B06, the three legal combinations."""
    messages = [USER, {"role": "assistant", "content": "Once "}]
    text = tokenizer.render_chat(
        messages, None, add_generation_prompt, continue_final_message=continue_final_message
    )
    assert text == expected


def test_the_illegal_combination_is_left_to_the_engine(tokenizer: LocalTokenizer) -> None:
    with pytest.raises(Unrenderable, match="continue_and_generate"):
        tokenizer.render_chat([USER], None, True, continue_final_message=True)


def test_continuation_under_a_template_that_strips() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    messages = [{"role": "assistant", "content": "Once upon  "}]
    text = rendered(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<Once upon"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no_messages"),
        (["text"], "message_shape"),
        ([{"content": "no role"}], "message_shape"),
        ([{"role": "user", "content": 5}], "content_shape"),
        ([{"role": "user", "content": [5]}], "part_shape"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part_shape"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool_calls_shape"),
        ([{"role": "user", "content": [["text"]]}], "part_shape"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}], "tool_calls_shape"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": DEEP}}]}], "tool_arguments_json"),
        ([{"role": "martian", "content": "x"}], "template_refused"),
    ],
)
def test_what_the_engine_refuses_is_not_rendered(
    tokenizer: LocalTokenizer, messages: list[Any], reason: str
) -> None:
    with pytest.raises(Unrenderable) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.reason == reason


@pytest.mark.parametrize("arguments", ['{"city": ', "[1, 2]", "42", "true", "null", " "])
def test_arguments_that_are_no_object_are_an_empty_one(tokenizer: LocalTokenizer, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert "<|call|>f {}<|end|>" in tokenizer.render_chat([USER, {"role": "assistant", "tool_calls": [call]}])


def test_a_bare_text_among_parts_is_a_part(tokenizer: LocalTokenizer) -> None:
    chat = [{"role": "user", "content": ["one", "", {"type": "text", "text": "two"}]}]
    assert tokenizer.render_chat(chat, add_generation_prompt=False) == "<|bos|><|user|>one\ntwo<|end|>"
    header = [{"role": "system", "content": ["x-anthropic-billing-header: 1", "Rules."]}]
    assert "billing" not in tokenizer.render_chat([*header, USER])


def test_empty_texts_among_parts_leave_no_line(tokenizer: LocalTokenizer) -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "", "two", "")]
    text = tokenizer.render_chat([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert text == "<|bos|><|user|>one\ntwo<|end|>"


def test_null_texts_are_skipped_and_thinking_is_text(tokenizer: LocalTokenizer) -> None:
    parts = [
        {"type": "text", "text": None},
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "x"},
    ]
    text = tokenizer.render_chat([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert text == "<|bos|><|user|>hm\nx<|end|>"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x-anthropic-billing-header: a=1;\nrules", "rules"),
        ("x-anthropic-billing-header: a=1;", ""),
        (
            [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "rules"}],
            "rules",
        ),
    ],
)
def test_the_billing_line_of_a_system_message_is_cut(
    tokenizer: LocalTokenizer, content: object, expected: str
) -> None:
    text = tokenizer.render_chat([{"role": "system", "content": content}], add_generation_prompt=False)
    assert text == f"<|bos|><|system|>{expected}<|end|>"


def test_developer_messages_join_the_system_message() -> None:
    """Where the template does not know the role; where it does, they stay."""
    messages = [
        {"role": "system", "content": "one"},
        USER,
        {"role": "developer", "content": "two", "tools": []},
    ]
    render = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    assert rendered(ChatTemplate(render), messages) == "[system:one\n\ntwo][user:Hello]"
    knows = "{% set known = 'developer' %}" + render
    assert rendered(ChatTemplate(knows), messages) == "[system:one][user:Hello][developer:two]"


def test_a_tool_result_is_one_text_for_every_template() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>"
        "{% else %}{% for p in m.content %}({{ p.text or p.name }}){% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(template, [{"role": "tool", "content": parts}]) == "<a\nb>"
    assert rendered(template, [{"role": "user", "content": parts}]) == "(a)(b)"
    named = [{"type": "tool_reference", "name": "f"}]
    assert rendered(template, [{"role": "tool", "content": named}]) == "(f)"


def test_unknown_keys_of_a_part_reach_a_template_that_walks_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{{ p | tojson }}{% endfor %}{% endfor %}"
    )
    part = {"cache_control": {"type": "x"}, "type": "text", "text": "a", "closed": True}
    expected = '{"type": "text", "text": "a", "cache_control": {"type": "x"}}'
    assert rendered(template, [{"role": "user", "content": [part]}]) == expected


def test_unknown_keys_of_a_tool_are_dropped() -> None:
    template = ChatTemplate("{{ tools | tojson }}")
    tool = {
        "x": 1,
        "function": {"y": 2, "strict": True, "name": "f", "parameters": None},
        "defer_loading": True,
    }
    assert rendered(template, [USER], [tool]) == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null, '
        '"strict": true, "defer_loading": true}, "defer_loading": true}]'
    )


def test_documents_are_always_defined() -> None:
    template = ChatTemplate("{% if documents is defined %}{{ documents }}{% endif %}")
    assert rendered(template, [USER]) == "None"
    assert rendered(template, [USER], documents=[]) == "[]"
    with pytest.raises(Unrenderable, match="documents_shape"):
        rendered(template, [USER], documents=["text"])


def test_generation_marks_change_nothing() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}"
    )
    assert rendered(template, [USER, USER]) == "Hello.Hello."


def test_a_final_message_that_the_template_changes_is_not_continued() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content | replace('a', 'b') }}{% endfor %}")
    with pytest.raises(Unrenderable, match="continue_not_rendered"):
        rendered(template, [{"role": "user", "content": "banana"}], None, **CONTINUE)


def test_a_template_without_end_is_refused() -> None:
    template = ChatTemplate("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")
    with pytest.raises(Unrenderable, match="template_refused"):
        rendered(template, [USER])


def test_a_template_cannot_reach_python() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}")
    with pytest.raises(Unrenderable, match="template_refused"):
        rendered(template, [USER])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "odd"]), "content": JSON},
    optional={"tool_calls": JSON, "reasoning": JSON, "name": JSON},
)


@settings(deadline=None)
@given(st.lists(MESSAGE | JSON, max_size=4), st.none() | st.lists(JSON, max_size=2), st.booleans())
def test_any_json_is_rendered_or_refused_and_never_changed(
    tokenizer: LocalTokenizer, messages: list[Any], tools: list[Any] | None, generate: bool
) -> None:
    before = copy.deepcopy((messages, tools))
    reason, text = "rendered", "<|bos|>"
    try:
        text = tokenizer.render_chat(messages, tools, generate, continue_final_message=not generate)
    except Unrenderable as error:
        reason = error.reason
    assert reason.isidentifier()
    assert text.startswith("<|bos|>")
    assert (messages, tools) == before
