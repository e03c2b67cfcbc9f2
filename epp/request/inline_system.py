"""System messages inside the conversation of /v1/messages: left there, or put in front.

The engine decides once, by a probe of the model's templates: one that refuses a later system message gets
all of them as one in front. Semantics: vLLM 0.32 `entrypoints/anthropic` (`_should_merge_inline_system`), its
limits included: the probe knows nothing that transformers adds to templates (`raise_exception`, dates,
`generation`), so a template that needs one of those for it counts as one that refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_PROBE: Final = tuple({"role": role, "content": "t"} for role in ("system", "user", "system", "user"))


def refuses_inline_system(source: str) -> bool:
    """Whether the engine takes the template `source` for one that wants its system message first."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    try:
        template = environment.from_string(source)
        template.render(messages=[dict(message) for message in _PROBE], add_generation_prompt=False)
    except Exception:  # noqa: BLE001  # with another error than jinja's own no engine starts
        return True
    return False


def with_system_in_front(messages: Sequence[Any]) -> list[Any]:
    """`messages` with the texts of all system messages as one in front."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *others] if texts else others
