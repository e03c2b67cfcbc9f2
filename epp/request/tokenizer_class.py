"""Whether an engine reads the files of a tokenizer directory as they stand.

Why: vLLM loads tokenizers with transformers 5. For some values of `tokenizer_class` it takes only the
vocabulary from tokenizer.json and builds the rest (normaliser, splitting) itself, and it adds every
token that tokenizer_config.json names. Where that gives other tokens than tokenizer.json says, a
router that follows the file would claim blocks that no engine holds: such a directory is refused at
the start, with a sentence that says how to get files that mean one thing. Semantics: transformers
5.19 `tokenization_utils_tokenizers` and the tokenizer classes named below; seen with vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tokenizers import Tokenizer, models

_QWEN_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# model types whose chats vLLM 0.32 renders in code of its own: their template says nothing of its prompts
_RENDERED_IN_CODE: Final = frozenset(
    ("gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_audio", "kimi_k3", "inkling")
)
_Parts = dict[str, Any]


def renders_in_code(model_config: Mapping[str, Any]) -> bool:
    """Whether the engine ignores the chat template of this model (config.json, {} if it is not there)."""
    return model_config.get("model_type") in _RENDERED_IN_CODE


def unread_reason(tokenizer: Tokenizer, config: Mapping[str, Any]) -> str | None:
    """Why an engine would not read `tokenizer` (as loaded from tokenizer.json) and `config`
    (tokenizer_config.json) as they stand; None: it does."""
    if config.get("split_special_tokens"):
        return "split_special_tokens is set, which is not supported"
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    added = sorted(set(_named_tokens(config)) - known)
    if added:
        return f"the engine adds the token {added[0]!r}, which tokenizer.json has not among its added tokens"
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    expected = _REBUILT.get(name)
    if expected is not None and _parts(tokenizer) != expected(config):
        return f"for tokenizer_class {name} the engine does not split text as tokenizer.json says"
    return None


def _named_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """Every token that the configuration names, and the defaults of its class."""
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    named: dict[str, Any] = {**_DEFAULT_TOKENS.get(name, {}), **config}
    extra = named.get("extra_special_tokens") or ()
    lists = [
        [value for key, value in named.items() if key.endswith("_token")],
        named.get("additional_special_tokens") or (),
        extra.values() if isinstance(extra, dict) else extra,
        (named.get("added_tokens_decoder") or {}).values(),
    ]
    for values in lists:
        for value in values:
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                yield text


def _parts(tokenizer: Tokenizer) -> _Parts:
    """What decides how text is cut, apart from the vocabulary."""
    model = tokenizer.model
    flags = (
        (model.byte_fallback, model.fuse_unk, model.ignore_merges) if isinstance(model, models.BPE) else None
    )
    return {
        "normalizer": _state(tokenizer.normalizer),
        "pre_tokenizer": _state(tokenizer.pre_tokenizer),
        "flags": flags,
    }


def _state(part: Any) -> Any:
    return None if part is None else _without_offsets(json.loads(part.__getstate__()))


def _without_offsets(state: Any) -> Any:
    """Without what only moves offsets."""
    if isinstance(state, dict):
        return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}
    return [_without_offsets(item) for item in state] if isinstance(state, list) else state


def _llama(config: Mapping[str, Any]) -> _Parts:
    prepend = "never"
    if config.get("add_prefix_space") in (None, True):
        prepend = "always" if config.get("legacy") else "first"
    splitting = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend, "split": False}
    return {"normalizer": None, "pre_tokenizer": splitting, "flags": (True, True, False)}


def _gemma(_: Mapping[str, Any]) -> _Parts:
    blanks = {"String": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": blanks, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": blanks,
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "flags": (True, True, False),
    }


def _qwen(config: Mapping[str, Any]) -> _Parts:
    split = {"type": "Split", "pattern": {"Regex": _QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, _byte_level(config, use_regex=False)]},
        "flags": (False, False, False),
    }


def _gpt2(config: Mapping[str, Any]) -> _Parts:
    return {
        "normalizer": None,
        "pre_tokenizer": _byte_level(config, use_regex=True),
        "flags": (False, False, False),
    }


def _byte_level(config: Mapping[str, Any], *, use_regex: bool) -> _Parts:
    prefixed = bool(config.get("add_prefix_space"))
    return {"type": "ByteLevel", "add_prefix_space": prefixed, "use_regex": use_regex}


_REBUILT: Final[Mapping[str, Callable[[Mapping[str, Any]], _Parts]]] = {
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
    "Qwen2Tokenizer": _qwen,
    "GPT2Tokenizer": _gpt2,
}
_DEFAULT_TOKENS: Final[Mapping[str, Mapping[str, str]]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": {
        "unk_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    },
    "GPT2Tokenizer": {
        "unk_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
    },
}
