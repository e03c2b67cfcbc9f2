"""Which templates get parts: each case is a way of writing templates, with vLLM 0.32's answer."""

from __future__ import annotations

import pytest

from epp.request.chat_template import ChatTemplate

LOOP = "{% for m in messages %}BODY{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("BODY", "{% for p in m.content %}{{ p.text }}{% endfor %}"),
        LOOP.replace("BODY", "{% for p in m['content'] %}{{ p.text }}{% endfor %}"),
        LOOP.replace("BODY", "{% for p in m.content | list %}{{ p.text }}{% endfor %}"),
        LOOP.replace("BODY", "{% for p in m.content[1:] %}{{ p.text }}{% endfor %}"),
        LOOP.replace("BODY", "{% set content = m.content %}{% for p in content %}{{ p.text }}{% endfor %}"),
        "{% set rest = messages[1:] %}{% set more = rest %}"
        "{% for m in more %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        "{% macro show(x) %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}"
        + LOOP.replace("BODY", "{{ show(m.content) }}"),
        "{% macro show(x) %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}"
        + LOOP.replace("BODY", "{{ show(x=m['content']) }}"),
    ],
)
def test_templates_that_walk_parts(source: str) -> None:
    assert ChatTemplate(source).content_format == "openai"


@pytest.mark.parametrize(
    "source",
    [
        "no loop",
        LOOP.replace("BODY", "{{ m.content }}"),
        LOOP.replace("BODY", "{% for c in m.tool_calls %}{{ c }}{% endfor %}"),
        # a message that is not taken from the messages in a loop
        "{% for p in message.content %}{{ p.text }}{% endfor %}",
        # another name for the content
        LOOP.replace("BODY", "{% set parts = m.content %}{% for p in parts %}{{ p.text }}{% endfor %}"),
        # a macro's own loop over a name that no call fills with a content
        "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
        + LOOP.replace("BODY", "{{ show(m.name) }}"),
        # more than one loop variable: the engine gives up
        LOOP.replace("BODY", "{% for a, b in m.content %}{{ a }}{% endfor %}"),
        "{% for a, b in messages %}{% for p in a.content %}{{ p }}{% endfor %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.m = messages %}"
        + LOOP.replace("BODY", "{% for p in m.content %}{{ p.text }}{% endfor %}"),
    ],
)
def test_templates_that_want_text(source: str) -> None:
    assert ChatTemplate(source).content_format == "string"
