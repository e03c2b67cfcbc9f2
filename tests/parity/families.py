"""Model directories of the chat-template families in the field, in our own words.

Each family is a tokenizer kind, its special tokens and a chat template that does what templates of
that family do (where tools go, what is stripped, what raises, which variables it asks for).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.parity import vocabularies

TEMPLATES: Final = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True, slots=True)
class Family:
    """`tokenizer_class` is what tokenizer_config.json says; `words` are added tokens, not special."""

    name: str
    kind: str
    tokenizer_class: str
    eos: str
    bos: str | None = None
    adds_bos: bool = False
    specials: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    unk: str | None = None


FAMILIES: Final = (
    Family(
        "chatml",
        kind="qwen_like",
        tokenizer_class="Qwen2Tokenizer",
        eos="<|im_end|>",
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        words=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    ),
    Family(
        "llama3",
        kind="byte_level",
        tokenizer_class="PreTrainedTokenizerFast",
        bos="<|begin_of_text|>",
        adds_bos=True,
        eos="<|eot_id|>",
        specials=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    Family(
        "mistral",
        kind="metaspace",
        tokenizer_class="LlamaTokenizer",
        bos="<s>",
        adds_bos=True,
        eos="</s>",
        unk="<unk>",
        specials=(
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
    ),
    Family(
        "gemma",
        kind="gemma_like",
        tokenizer_class="GemmaTokenizer",
        bos="<bos>",
        adds_bos=True,
        eos="<eos>",
        unk="<unk>",
        specials=(
            "<bos>",
            "<eos>",
            "<pad>",
            "<mask>",
            "<start_of_turn>",
            "<end_of_turn>",
            "<start_of_image>",
        ),
        words=("\n\n", "\n\n\n", "▁▁", "▁▁▁▁"),
    ),
    Family(
        "phi",
        kind="legacy_metaspace",
        tokenizer_class="PreTrainedTokenizerFast",
        bos="<s>",
        eos="<|endoftext|>",
        unk="<unk>",
        specials=(
            "<|endoftext|>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|end|>",
            "<|tool|>",
            "<|/tool|>",
        ),
    ),
    Family(
        "harmony",
        kind="byte_level",
        tokenizer_class="PreTrainedTokenizerFast",
        bos="<|startoftext|>",
        eos="<|return|>",
        specials=(
            "<|startoftext|>",
            "<|return|>",
            "<|start|>",
            "<|message|>",
            "<|channel|>",
            "<|end|>",
            "<|call|>",
        ),
    ),
    Family(
        "deepseek",
        kind="byte_level",
        tokenizer_class="TokenizersBackend",
        bos="<｜begin▁of▁sentence｜>",
        adds_bos=True,
        eos="<｜end▁of▁sentence｜>",
        specials=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        words=(
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
    ),
    Family(
        "glm",
        kind="byte_level",
        tokenizer_class="PreTrainedTokenizerFast",
        eos="<|endoftext|>",
        specials=(
            "<|endoftext|>",
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
        ),
        words=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "/nothink"),
    ),
    Family(
        "parts",
        kind="qwen_like",
        tokenizer_class="Qwen2TokenizerFast",
        eos="<|im_end|>",
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|documents|>"),
    ),
)


def by_name(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def write_family(family: Family, directory: Path) -> None:
    """The files of a tokenizer directory in the Hugging Face layout."""
    directory.mkdir(parents=True, exist_ok=True)
    built = vocabularies.KINDS[family.kind](
        family.bos if family.adds_bos else None, family.specials, family.words
    )
    _write(directory / "tokenizer.json", built)
    config: dict[str, Any] = {
        "tokenizer_class": family.tokenizer_class,
        "eos_token": family.eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65_536,
    }
    for key, token in (("bos_token", family.bos), ("unk_token", family.unk)):
        if token is not None:
            config[key] = token
    _write(directory / "tokenizer_config.json", config)
    template = (TEMPLATES / f"{family.name}.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
