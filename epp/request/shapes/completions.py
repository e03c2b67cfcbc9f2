"""/v1/completions: text, list of texts, token ids, list of token-id lists."""

from __future__ import annotations

from array import array
from typing import Any

from epp.request.prompts import NoPrompt, Prompt, Reason, TextPrompt, TokenPrompt
from epp.request.shapes.fields import read_flag


def read_prompt(fields: dict[str, Any]) -> tuple[Prompt, int]:
    """The first prompt and how many there are. What is none of the four forms (empty, mixed,
    missing) gets the engine's own error, so it is only routed."""
    add_special_tokens = read_flag(fields, "add_special_tokens", True)
    if fields.get("truncate_prompt_tokens") is not None:
        raise NoPrompt(Reason.TRUNCATED_PROMPT)
    if fields.get("prompt_embeds") is not None:
        raise NoPrompt(Reason.PROMPT_EMBEDS)
    if fields.get("suffix") is not None:
        raise NoPrompt(Reason.SUFFIX)  # rendered by the model's own fill-in-the-middle format
    given = fields.get("prompt")
    if isinstance(given, str):
        return TextPrompt(given, add_special_tokens), 1
    if not isinstance(given, list) or not given:
        raise NoPrompt(Reason.PROMPT_SHAPE)
    first = given[0]
    if type(first) is int:
        return token_prompt(given), 1
    types = set(map(type, given))
    if types == {str}:
        return TextPrompt(first, add_special_tokens), len(given)
    if types == {list} and all(given) and type(first[0]) is int:
        return token_prompt(first), len(given)
    raise NoPrompt(Reason.PROMPT_SHAPE)


def token_prompt(token_ids: list[Any]) -> TokenPrompt:
    """The ids as a buffer, which the index reads without a look at every number."""
    try:
        return TokenPrompt(array("I", token_ids))
    except OverflowError:
        raise NoPrompt(Reason.TOKEN_RANGE) from None
    except TypeError:
        raise NoPrompt(Reason.PROMPT_SHAPE) from None
