"""Begin and end token as `tokenizer_config.json` wants them, written to the tokenizer itself.

Where `add_bos_token` or `add_eos_token` is written, an engine puts those tokens around a text whatever
tokenizer.json says. Semantics: transformers 5, `TokenizersBackend.update_post_processor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, processors

from epp.core.errors import ConfigError


def apply_settings(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Change `tokenizer` as an engine does that reads the same file. Raises `ConfigError`."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    before = _frame_token(tokenizer, config, "bos")
    after = _frame_token(tokenizer, config, "eos")
    template = [*(name for name, _ in before), "$A", *(name for name, _ in after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=[*before, *after]
    )


def token_text(value: Any) -> str | None:
    """A special token is written as text or as `{"content": text, ...}`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _frame_token(tokenizer: Tokenizer, config: Mapping[str, Any], which: str) -> list[tuple[str, int]]:
    text = token_text(config.get(f"{which}_token"))
    if config.get(f"add_{which}_token") is not True or text is None:
        return []
    number = tokenizer.token_to_id(text)
    if number is None:
        raise ConfigError(f"tokenizer_config.json: {which}_token is not in the vocabulary of tokenizer.json")
    return [(text, number)]
