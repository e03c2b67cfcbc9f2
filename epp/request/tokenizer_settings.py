"""What `tokenizer_config.json` changes about the tokens of a text, done to the tokenizer itself.

Honoured: `split_special_tokens`; added and special tokens that tokenizer.json lacks; `add_bos_token` and
`add_eos_token` where written. Semantics: transformers 5, `TokenizersBackend`. Not read: the class name
(tokenizer.json decides), truncation and padding (engines set their own), everything about decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, processors

from epp.core.errors import ConfigError

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def apply_settings(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Change `tokenizer` as an engine does that reads the same file. Raises `ConfigError`."""
    if config.get("split_special_tokens") is True:
        tokenizer.encode_special_tokens = True
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in _tokens(config) if token.content not in known]
    if missing:
        tokenizer.add_tokens(missing)
    if "add_bos_token" in config or "add_eos_token" in config:
        _frame(tokenizer, config)


def token_text(value: Any) -> str | None:
    """A special token is written as text or as `{"content": text, ...}`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """All tokens the file names: those with an id by their ids, then the special ones."""
    by_id = config.get("added_tokens_decoder") or {}
    try:
        for number in sorted(by_id, key=int):
            yield _token(by_id[number])
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"tokenizer_config.json: added_tokens_decoder: {type(error).__name__}") from error
    for name in _NAMED:
        yield from _special(config.get(name))
    for name in _LISTS:
        values = config.get(name) or []
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _special(value)


def _token(value: Mapping[str, Any]) -> AddedToken:
    return AddedToken(value["content"], **{flag: bool(value[flag]) for flag in _FLAGS if flag in value})


def _special(value: Any) -> Iterator[AddedToken]:
    text = token_text(value)
    if text:
        flags = value if isinstance(value, Mapping) else {}
        yield _token({"normalized": False, **flags, "content": text, "special": True})


def _frame(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Write begin and end token around a text as the flags say, whatever tokenizer.json says."""
    before = _frame_token(tokenizer, config, "bos")
    after = _frame_token(tokenizer, config, "eos")
    template = [*(name for name, _ in before), "$A", *(name for name, _ in after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=[*before, *after]
    )


def _frame_token(tokenizer: Tokenizer, config: Mapping[str, Any], which: str) -> list[tuple[str, int]]:
    text = token_text(config.get(f"{which}_token"))
    if config.get(f"add_{which}_token") is not True or text is None:
        return []
    number = tokenizer.token_to_id(text)
    assert number is not None, "it was added where it was missing"
    return [(text, number)]
