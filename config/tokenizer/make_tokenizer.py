"""Train the tokenizer that the local fleet ships with: a byte-level BPE of 8,192 entries.

Why: the router and the emulated engines need a *real* tokenizer with a begin token and a chat
template, and no model's tokenizer may be redistributed here. Everything it is trained on is either
`corpus.txt` and `words.txt` (our own) or made below from a fixed seed, so running this again gives the same
bytes (`--check` compares). It must not read anything outside this directory.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DIRECTORY: Final = Path(__file__).resolve().parent
VOCABULARY_ENTRIES: Final = 8192
SEED: Final = 20260822
BOS: Final = "<|bos|>"
SPECIAL_TOKENS: Final = (
    BOS,
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|tools|>",
    "<|call|>",
    "<|end|>",
)
# words, numbers in groups of at most three digits, punctuation, white space
SPLIT_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SUFFIXES: Final = (
    "",
    "s",
    "ed",
    "er",
    "ers",
    "ing",
    "ings",
    "able",
    "ful",
    "less",
    "ly",
    "ment",
    "ness",
    "ion",
)
OTHER_SCRIPTS: Final = (
    "Über den Dächern wurde es ruhig, und die Straße gehörte wieder den Katzen.",
    "Le café près de l'église était fermé, mais la forêt sentait déjà l'été.",
    "El niño soñó con un pequeño jardín lleno de árboles y pájaros.",
    "Утром в городе было тихо, и только река говорила с мостом.",
    "今日は天気がいいので、川まで歩きました。",
    "图书馆每天早上八点开门,晚上九点关门。",
    "오늘 아침에 강가를 걸었습니다.",
    "पुस्तकालय सुबह आठ बजे खुलता है।",
    "ذهبنا إلى السوق في الصباح الباكر.",
    "Done ✅ — see “notes” … naïve ≠ simple 🙂🚀",
)
SMALL_WORDS: Final = (
    "the",
    "a",
    "of",
    "to",
    "in",
    "and",
    "is",
    "for",
    "with",
    "that",
    "on",
    "as",
    "it",
    "by",
    "from",
    "at",
    "or",
    "be",
    "this",
    "not",
    "are",
    "was",
)
IDENTIFIERS: Final = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "user",
    "admin",
    "config",
    "path",
    "value",
    "result",
    "index",
    "token",
    "block",
    "cache",
    "queue",
    "server",
    "client",
    "request",
    "response",
    "endpoint",
    "prefix",
    "tier",
    "source",
    "target",
)


def make_text(rng: random.Random, prose: Sequence[str], roots: Sequence[str]) -> Iterator[str]:
    """The training text in pieces of about a paragraph; a pure function of its arguments."""
    for _ in range(12):
        yield from prose
    words = [root + suffix for root in roots for suffix in SUFFIXES]
    for _ in range(5000):
        yield _sentence(rng, words)
    for _ in range(40):
        yield from OTHER_SCRIPTS
    for _ in range(1200):
        yield _code_line(rng)
        yield _json_line(rng)
    for number in range(1000):  # every group of at most three digits becomes one token
        for _ in range(30):
            yield f"{number:03d}"
            yield f"{number % 100:02d}"
    for _ in range(300):
        yield " ".join(
            f"{rng.choice(('word', 'item', 'doc', 'line'))}{rng.randrange(10000)}" for _ in range(20)
        )


def _sentence(rng: random.Random, words: Sequence[str]) -> str:
    length = rng.randint(6, 24)
    picked = [rng.choice(SMALL_WORDS if rng.random() < 0.4 else words) for _ in range(length)]
    picked[0] = picked[0].capitalize()
    return " ".join(picked) + rng.choice((".", ".", ".", "?", "!", ";", ":", ","))


def _code_line(rng: random.Random) -> str:
    a, b, c = (rng.choice(IDENTIFIERS) for _ in range(3))
    return rng.choice(
        (
            f"def {a}_{b}(self, {c}: int) -> None:\n    return self.{a}[{c}]\n",
            f'    if {a} is not None and {b} != {c}:\n        raise ValueError(f"{a}: {{{b}}}")\n',
            f"for ({a} = 0; {a} < {b}.length; {a}++) {{\n\t{c}.push({b}[{a}]);\n}}\n",
            f"kubectl get {a}s -n {b} -o json | jq '.items[].{c}'\n",
        )
    )


def _json_line(rng: random.Random) -> str:
    a, b = rng.choice(IDENTIFIERS), rng.choice(IDENTIFIERS)
    return (
        f'{{"type": "function", "function": {{"name": "{a}_{b}", "description": null, "parameters": '
        f'{{"type": "object", "properties": {{"{b}": {{"type": "string"}}}}, "required": ["{b}"]}}}}}}'
    )


def train(prose: Sequence[str], roots: Sequence[str]) -> Tokenizer:
    """Train on `make_text`; deterministic for one version of `tokenizers`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_ENTRIES,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(make_text(random.Random(SEED), prose, roots), trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DIRECTORY / "tokenizer.json")
    parser.add_argument("--check", action="store_true", help="compare with --output instead of writing it")
    arguments = parser.parse_args()
    prose = (DIRECTORY / "corpus.txt").read_text(encoding="utf-8").split("\n\n")
    roots = (DIRECTORY / "words.txt").read_text(encoding="utf-8").split()
    made = train(prose, roots).to_str(pretty=False) + "\n"
    if not arguments.check:
        arguments.output.write_text(made, encoding="utf-8")
        return 0
    if arguments.output.read_text(encoding="utf-8") == made:
        return 0
    sys.stderr.write(f"{arguments.output} differs from what this script makes\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
