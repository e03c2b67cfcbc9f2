"""The kinds of tokenizers the families use: byte-level and SentencePiece-like BPE, made on the spot.

Each kind differs where tokenizers differ in the field: normalisation, pre-tokenisation, byte
fallback, a begin token from the post-processor or none. Deterministic for one version of
`tokenizers`; the training text is the one of the shipped tokenizer.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SHIPPED: Final = Path(__file__).resolve().parents[2] / "config" / "tokenizer"

QWEN_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPM_ENTRIES: Final = 1800


def byte_level(bos: str | None, specials: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """The shipped byte-level BPE (digits in threes); `bos` is put first when special tokens are asked for."""
    return _finished(copy.deepcopy(_shipped()), bos, specials, words)


def qwen_like(bos: str | None, specials: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """The same vocabulary behind NFC and single digits, with no begin token at all."""
    built = copy.deepcopy(_shipped())
    built["normalizer"] = {"type": "NFC"}
    built["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": QWEN_PATTERN}
    return _finished(built, bos, specials, words)


def metaspace(bos: str | None, specials: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """SentencePiece-like with byte fallback; a blank is put before the first word of the text only."""
    built = copy.deepcopy(_sentencepiece())
    built["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    return _finished(built, bos, specials, words)


def legacy_metaspace(bos: str | None, specials: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """As converters wrote it for years: a blank before every stretch of text between special tokens."""
    built = copy.deepcopy(_sentencepiece())
    built["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    return _finished(built, bos, specials, words)


def gemma_like(bos: str | None, specials: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """Blanks become marks before anything else, nothing is put in front, byte fallback."""
    built = copy.deepcopy(_sentencepiece())
    built["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    built["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    return _finished(built, bos, specials, words)


KINDS: Final[Mapping[str, Callable[[str | None, Sequence[str], Sequence[str]], dict[str, Any]]]] = {
    "byte_level": byte_level,
    "qwen_like": qwen_like,
    "metaspace": metaspace,
    "legacy_metaspace": legacy_metaspace,
    "gemma_like": gemma_like,
}


def _finished(
    built: dict[str, Any], bos: str | None, specials: Sequence[str], words: Sequence[str]
) -> dict[str, Any]:
    """`built` with the family's added tokens; `words` are added tokens that are not special."""
    built["post_processor"] = None
    tokenizer = Tokenizer.from_str(json.dumps(built))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in words])
    done: dict[str, Any] = json.loads(tokenizer.to_str())
    if bos is not None:
        single: list[dict[str, Any]] = [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        done["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.token_to_id(bos)], "tokens": [bos]}},
        }
    return done


@functools.cache
def _shipped() -> dict[str, Any]:
    shipped: dict[str, Any] = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    return shipped


@functools.cache
def _sentencepiece() -> dict[str, Any]:
    """A BPE over marks instead of blanks, with a token for every byte that has no character."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=SPM_ENTRIES,
        min_frequency=2,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    texts = [(SHIPPED / name).read_text(encoding="utf-8") for name in ("corpus.txt", "words.txt")]
    tokenizer.train_from_iterator(texts, trainer=trainer)
    built: dict[str, Any] = json.loads(tokenizer.to_str())
    built["normalizer"] = built["pre_tokenizer"] = None
    # the byte tokens are part of the vocabulary, but no text may spell one
    built["added_tokens"] = [
        token for token in built["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return built
