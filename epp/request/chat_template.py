"""A model's chat template, rendered as `transformers` renders it (sandboxed Jinja).

Why here: the engine renders with transformers; the router must get the same text without pulling
that package in. Semantics: transformers `utils/chat_template_utils`. The template belongs to the
model directory and is trusted as far as the sandbox goes; a request's own template is never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epp.request.chat import Unrenderable, engine_messages, engine_tools
from epp.request.content_format import ContentFormat, content_format
from epp.request.inline_system import refuses_inline_system
from epp.request.prompts import ChatPrompt

ContentFormatFlag = Literal["auto", "string", "openai"]

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

    def __init__(self, source: str, *, content_format_flag: ContentFormatFlag = "auto") -> None:
        """`content_format_flag`: the engine's --chat-template-content-format. Raises
        `jinja2.TemplateSyntaxError` when `source` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.content_format: Final[ContentFormat] = (
            content_format(environment.parse(source))
            if content_format_flag == "auto"
            else content_format_flag
        )
        self._knows_developer = "'developer'" in source or '"developer"' in source
        self._names_content = "content" in source
        self._template = environment.from_string(source)
        self._source = source

    def refuses_inline_system(self) -> bool:
        """Whether an engine puts system messages from inside a /v1/messages conversation in front of it."""
        return refuses_inline_system(self._source)

    def render(self, prompt: ChatPrompt, variables: Mapping[str, Any], tools: Sequence[Any] | None) -> str:
        """The prompt text of a chat, begin token included where the template writes one. `variables` of the
        template and `tools` are those that are in force, whatever `prompt` says of them.

        Raises:
            Unrenderable: the engine would refuse this chat, or the template itself does.
        """
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise Unrenderable("continue_and_generate")
        shaped = engine_messages(
            prompt.messages,
            self.content_format,
            knows_developer=self._knows_developer,
            with_items=bool(prompt.items),
        )
        final = ""
        if prompt.continue_final_message:
            if not self._names_content:
                raise Unrenderable("continue_not_rendered")
            final = _mark_final(shaped[-1])
        values = {"documents": None, **variables}
        values["messages"] = shaped
        values["tools"] = engine_tools(tools)
        values["add_generation_prompt"] = prompt.add_generation_prompt
        _check_documents(values["documents"])
        try:
            text = self._template.render(values)
        except _TEMPLATE_FAULTS as error:
            raise Unrenderable("template_refused") from error
        return _cut_at_mark(text, final) if prompt.continue_final_message else text


class _Generation(Extension):
    """`{% generation %}`: marks for training what the assistant wrote. Its body is rendered as it is,
    in a scope of its own, as transformers does it."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _check_documents(documents: Any) -> None:
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(document, dict) for document in documents)
    ):
        raise Unrenderable("documents_shape")


def _mark_final(message: dict[str, Any]) -> str:
    """Append the mark to the last text of `message`, which is ours to change; that text before."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
        return content
    for part in reversed(content):
        if "text" in part:
            text: str = part["text"]
            part["text"] += _CONTINUE_MARK
            return text
    raise Unrenderable("continue_without_text")


def _cut_at_mark(text: str, final: str) -> str:
    """`text` up to the mark. A template that strips messages also strips the mark's blank, and then
    the blanks before the mark would have been stripped too."""
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise Unrenderable("continue_not_rendered")
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()


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
