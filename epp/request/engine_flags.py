"""Flags of the engine's server that change the tokens of a chat, and what they change.

The picker cannot see how an engine was started, so the token-producer is told (docs/tokens.md lists them).
Semantics: vLLM 0.32 `entrypoints/launchers/cli_args`. Flags that are not here change no tokens, or belong to
engines whose tokens only the render back end knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from epp.request.chat import Unrenderable
from epp.request.chat_template import ContentFormatFlag
from epp.request.prompts import ChatPrompt
from epp.request.shapes.fields import RESERVED_TEMPLATE_KWARGS, effort_kwargs

DisabledThinkingFlag = Literal["auto", "none", "low", "medium", "high", "xhigh", "max"]
# request fields that are always set, so that a default of theirs means nothing
_ALWAYS_GIVEN: Final = frozenset(("add_generation_prompt", "continue_final_message"))
_PROBED_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_PROBE: Final = ({"role": "user", "content": "Hi"},)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """`default_template_kwargs`: --default-chat-template-kwargs; `content_format`:
    --chat-template-content-format; `drops_unused_tools`: --exclude-tools-when-tool-choice-none;
    `disabled_thinking`: --anthropic-disabled-thinking-effort."""

    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    content_format: ContentFormatFlag = "auto"
    drops_unused_tools: bool = False
    disabled_thinking: DisabledThinkingFlag = "auto"

    def template_kwargs(self, prompt: ChatPrompt, disabled_effort: Callable[[], str]) -> dict[str, Any]:
        """All variables of the template besides messages and tools; the request's own win.
        `disabled_effort` is asked for only where thinking is switched off."""
        given = dict(prompt.template_kwargs)
        if prompt.thinking_disabled:
            given |= effort_kwargs(disabled_effort(), given)
        return {**self.default_template_kwargs, **given}

    def tools(self, prompt: ChatPrompt) -> list[Any] | None:
        return None if prompt.tools_off and self.drops_unused_tools else prompt.tools


DEFAULT_FLAGS: Final = EngineFlags()


def refused_defaults(kwargs: Mapping[str, Any]) -> str | None:
    """The name in `kwargs` that no engine may have as a default; None: all are fine."""
    return next((name for name in kwargs if name in RESERVED_TEMPLATE_KWARGS | _ALWAYS_GIVEN), None)


def probed_effort(render: Callable[[ChatPrompt], str]) -> str:
    """The effort that stands for switched-off thinking where the engine decides by a probe of its
    template: "low" if it refuses "none" or renders it like another effort."""
    asked = ChatPrompt(list(_PROBE))

    def rendered(effort: str) -> str | None:
        try:
            return render(replace(asked, template_kwargs=effort_kwargs(effort, {})))
        except Unrenderable:
            return None

    off = rendered("none")
    if off is None or any(rendered(effort) == off for effort in _PROBED_EFFORTS):
        return "low"
    return "none"
