"""Small tokenizers of the families in use, trained here on our own words: for exactness tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CONFIG: Final = Path(__file__).resolve().parents[3] / "config" / "tokenizer"
SPECIALS: Final = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")

GPT4: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN: Final = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
O200K: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _corpus() -> list[str]:
    text = (CONFIG / "corpus.txt").read_text(encoding="utf-8")
    return [
        *text.split("\n\n"),
        "<|im_start|>user\nhi  there<|im_end|>\n",
        "中文 文本 été Ünïcödé 12345 \r\n\r\n x",
    ]


def _finish(tokenizer: Tokenizer, trainer: Any, *, bos: bool = True) -> Tokenizer:
    tokenizer.train_from_iterator(_corpus(), trainer=trainer)
    tokenizer.add_special_tokens([token for token in SPECIALS if tokenizer.token_to_id(token) is None])
    if bos:
        pair = ("<|bos|>", tokenizer.token_to_id("<|bos|>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[pair]
        )
    return tokenizer


def _byte_level(pattern: str | None, normalizer: Any = None, *, prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    return _finish(tokenizer, trainer)


def _phi() -> Tokenizer:
    """Added tokens that take the white space behind them, runs of blanks as added tokens."""
    tokenizer = _byte_level(None)
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(" " * n, normalized=False) for n in (2, 3, 4)])
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False, special=True)])
    tokenizer.add_tokens([AddedToken("harbour", single_word=True, normalized=True)])
    return tokenizer


def _llama2() -> Tokenizer:
    """No pre-tokenizer at all; the normalizer writes a blank in front of every piece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # to train; the real one has none
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    _finish(tokenizer, trainer)
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(state))


def _metaspace(scheme: str) -> Tokenizer:
    """Llama 2 as newer files write it, byte fallback included."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    return _finish(tokenizer, trainer)


def _metaspace_unsplit() -> Tokenizer:
    state = json.loads(_metaspace("first").to_str())
    state["pre_tokenizer"]["split"] = False
    return Tokenizer.from_str(json.dumps(state))


def _gemma() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=["<unk>", *SPECIALS])
    return _finish(tokenizer, trainer)


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, show_progress=False, special_tokens=["[UNK]", *SPECIALS]
    )
    _finish(tokenizer, trainer, bos=False)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<|endoftext|>", "<|bos|>")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=600, show_progress=False, unk_token="<unk>", special_tokens=["<unk>", *SPECIALS]
    )
    return _finish(tokenizer, trainer)


def _deepseek() -> Tokenizer:
    tokenizer = _byte_level(GPT4)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), behavior="isolated"),
            pre_tokenizers.Split(
                Regex(
                    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _falcon() -> Tokenizer:
    tokenizer = _byte_level(None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )
    return tokenizer


def _strip() -> Tokenizer:
    """Normalizers that depend on where a piece begins and ends."""
    steps = [normalizers.Strip(), normalizers.Prepend("_"), normalizers.Replace("ab", "c")]
    return _byte_level(GPT4, normalizers.Sequence(steps))


_BUILDERS: Final[dict[str, Callable[[], Tokenizer]]] = {
    "shipped": lambda: Tokenizer.from_file(str(CONFIG / "tokenizer.json")),
    "gpt2": lambda: _byte_level(None),
    "roberta": lambda: _byte_level(None, prefix_space=True),
    "llama3": lambda: _byte_level(GPT4),
    "qwen": lambda: _byte_level(QWEN, normalizers.NFC()),
    "o200k": lambda: _byte_level(O200K),
    "deepseek": _deepseek,
    "phi": _phi,
    "falcon": _falcon,
    "metaspace_first": lambda: _metaspace("first"),
    "metaspace_always": lambda: _metaspace("always"),
    "metaspace_never": lambda: _metaspace("never"),
    "word_piece": _word_piece,
    "unigram": _unigram,
    # only in front of added tokens
    "llama2": _llama2,
    "metaspace_unsplit": _metaspace_unsplit,
    "gemma": _gemma,
    "strip": _strip,
}
AT_MARKS = ("shipped", "gpt2", "llama3", "qwen", "o200k", "deepseek", "phi")
AT_BLANKS: Final = tuple(list(_BUILDERS)[:14])
ALL: Final = tuple(_BUILDERS)


@functools.cache
def family(name: str) -> Tokenizer:
    return _BUILDERS[name]()
