"""vLLM's token-in API, /inference/v1/generate: the client has rendered and tokenised."""

from __future__ import annotations

from typing import Any

from epp.request.prompts import NoPrompt, Prompt, Reason
from epp.request.shapes.completions import token_prompt


def read_prompt(fields: dict[str, Any]) -> tuple[Prompt, int]:
    """`token_ids` as they are. With multimodal items the keys of blocks depend on more than tokens."""
    if fields.get("features") or fields.get("content_parts"):
        raise NoPrompt(Reason.MULTIMODAL)
    token_ids = fields.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids or type(token_ids[0]) is not int:
        raise NoPrompt(Reason.PROMPT_SHAPE)
    return token_prompt(token_ids), 1
