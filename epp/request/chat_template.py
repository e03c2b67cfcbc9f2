"""A model's chat template, rendered as `transformers` renders it (sandboxed Jinja).

Why here: the engine renders with transformers; the router must get the same text without pulling
that package in. Semantics: transformers `utils/chat_template_utils`. The template belongs to the
model directory and is trusted as far as the sandbox goes; a request's own template is never run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epp.request.chat import ContentFormat, Unrenderable, engine_messages, engine_tools

# the mark of transformers itself: some templates look for it
_CONTINUE_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
# what a template can raise when it meets a message it was not written for
_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """Compiled template; rendering is pure apart from `strftime_now`. Thread-safe."""

    def __init__(self, source: str) -> None:
        """Raises `jinja2.TemplateSyntaxError` when `source` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.content_format: Final = _content_format(environment.parse(source))
        self._template = environment.from_string(source)

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a chat, begin token included where the template writes one.

        Raises:
            Unrenderable: the engine would refuse this chat, or the template itself does.
        """
        if continue_final_message and add_generation_prompt:
            raise Unrenderable("continue_and_generate")
        shaped = engine_messages(messages, self.content_format)
        if continue_final_message:
            _mark_final(shaped[-1])
        values = template_kwargs | {
            "messages": shaped,
            "tools": engine_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(values)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
        ) as error:
            raise Unrenderable("template_refused") from error
        return _cut_at_mark(text) if continue_final_message else text


def _mark_final(message: dict[str, Any]) -> None:
    """Append the mark to the last text of `message`, which is ours to change."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
    elif content:
        content[-1]["text"] += _CONTINUE_MARK
    else:
        raise Unrenderable("continue_without_text")


def _cut_at_mark(text: str) -> str:
    """`text` up to the mark. A template that strips messages also strips the mark's blank, and then
    the blanks before the mark would have been stripped too."""
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise Unrenderable("continue_not_rendered")
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()


def _content_format(tree: nodes.Template) -> ContentFormat:
    """ "openai" if the template walks the parts of a message's content, else it wants one text."""
    for loop in tree.find_all(nodes.For):
        if _names_content(loop.iter):
            return "openai"
    return "string"


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _names_content(node.node)
    return False


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
