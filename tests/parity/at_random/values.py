"""Chances, texts and JSON values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from tests.parity.chats import Fields

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _split(*lines: str) -> tuple[str, ...]:
    return tuple(word for line in lines for word in line.split())


_WORDS: Final = _split("the river block über token cache, 42 1234567", "naïve 日本 it's x=y; «q» -- #")
# what tokenizers and templates treat in a way of their own
_PIECES: Final = (
    *("", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u3000", "\u00a0", "\u200b", "\ufeff", "\x00", "\x85"),
    *(
        "\u2028",
        "e\u0301",
        "ﬁ",
        "Ⅷ",
        "½",
        "👩‍👩‍👧",
        "🙂",
        "\u1100\u1161\u11a8",
        "ا",
        "ไทย",
        "𝔘",
        "\U0010ffff",
    ),
    *("<think>\n", "\n</think>\n\n", "{{ messages }}", "{% raw %}", "CONTINUE_FINAL_MESSAGE_TAG "),
    *("x-anthropic-billing-header: 1", "x-anthropic-billing-header: 1\n", '{"a": 1}'),
    *_split(
        "ẛ̣ <|im_end|> <|im_start|> <s> </s> <unk> [INST] [/INST] <|eot_id|> <bos> <0x0A> <image>",
        "<think> </think> <tool_call> <｜User｜> <|end|> <|image_pad|> <|im_ end|> <thi ▁ ▁▁ /nothink",
        "/think [gMASK] <|channel|> final None null [] ' \" \\ &lt; CONTINUE_FINAL_MESSAGE_TAG",
    ),
)
_SCALARS: Final = (
    *("a", "Köln", 0, -1, 1.0, 2.50, 1e3, 1e-7, 1e22, True, None, ""),
    *(2**53, 2**63, -(2**63), "</x>&'\""),
)
_KEYS: Final = ("b", "a", "type", "city", "naïve", "", "name", "x")
_VARIABLES: Final = (
    *("enable_thinking", "thinking", "tools_in_user_message", "custom_tools", "date_string", "x"),
    *("reasoning_effort", "model_identity", "builtin_tools", "documents", "bos_token", "eos_token"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "truncate"),
    *("chat_template", "tools", "keep_all_reasoning", "clear_thinking", "add_vision_id"),
)
_VARIABLE_VALUES: Final = (True, False, None, "auto", "high", "none", [], {}, "x", 0, 1)


class Values:
    """One source of chance for all parts of a request."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self._rng.random() < share

    def up_to(self, most: int, least: int = 0) -> int:
        return self._rng.randint(least, most)

    def pick(self, *values: Any) -> Any:
        return self._rng.choice(values)

    def some(self, make: Callable[[], Any], most: int, least: int = 0) -> list[Any]:
        return [make() for _ in range(self.up_to(most, least))]

    def maybe(self, fields: Fields, share: float, name: str, make: Callable[[], Any]) -> None:
        if self.chance(share):
            fields[name] = make()

    def text(self) -> str:
        """Words, and among them what is special; rarely nothing, or a thousand words."""
        if self.chance(0.06):
            return ""
        if self.chance(0.02):
            return " ".join(self._rng.choices(_WORDS, k=self.up_to(900, 300)))
        parts = [self._rng.choice(_PIECES if self.chance(0.25) else _WORDS) for _ in range(self.up_to(12, 1))]
        return str(self.pick(" ", " ", "", "\n").join(parts))

    def text_or_less(self) -> Any:
        return self.pick(self.text(), self.text(), self.text(), None, "")

    def ids(self) -> list[int]:
        return [self._rng.randrange(0, 1500) for _ in range(self.up_to(40, 1))]

    def json(self, depth: int = 2) -> Any:
        if depth == 0 or self.chance(0.5):
            return self.text() if self.chance(0.2) else self.pick(*_SCALARS)
        if self.chance(0.4):
            return self.some(lambda: self.json(depth - 1), 3)
        return self.object(depth - 1)

    def object(self, depth: int = 2) -> Fields:
        return {self.pick(*_KEYS): self.json(depth) for _ in range(self.up_to(3))}

    def flag(self) -> Any:
        return self.pick(True, False, None)

    def variables(self) -> Fields:
        """`chat_template_kwargs`."""
        return {self.pick(*_VARIABLES): self.pick(*_VARIABLE_VALUES) for _ in range(self.up_to(2))}

    def reordered(self, fields: Fields, share: float = 0.2) -> Fields:
        return dict(reversed(fields.items())) if self.chance(share) else fields
