"""Documents and questions of the scenario: real text of an exact token length, the same at every run."""

from __future__ import annotations

import random
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_CORPUS = "corpus.txt"
_MARGIN_TOKENS = 16  # a text cut at a token reads back as about as many
_VOCABULARY = "tokenizer.json"

Message = dict[str, str]


class Texts:
    """Makes texts from the sentences of the tokenizer's own corpus, in an order given by a seed."""

    def __init__(self, tokenizer_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_dir / _VOCABULARY))
        corpus = (tokenizer_dir / _CORPUS).read_text(encoding="utf-8")
        self._sentences = [s.strip() for s in _SENTENCE_END.split(corpus) if s.strip()]
        self.document = lru_cache(maxsize=64)(self._document)

    def _document(self, seed: str, tokens: int) -> str:
        """A text of `tokens` tokens. Two seeds differ from the first block on."""
        rng = random.Random(seed)
        parts = [f"Report {seed}."]
        length_chars, enough_chars = 0, tokens * 8
        while length_chars < enough_chars:
            sentence = rng.choice(self._sentences)
            parts.append(sentence)
            length_chars += len(sentence) + 1
        text = " ".join(parts)
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        if len(encoding.ids) < tokens:
            raise ValueError(f"the corpus gives {len(encoding.ids)} tokens, {tokens} were asked for")
        exact: str = self._tokenizer.decode(encoding.ids[:tokens])
        return exact

    def tokens(self, seed: str, tokens: int) -> list[int]:
        """Exactly so many token ids, of a document's text."""
        text = self.document(seed, tokens + _MARGIN_TOKENS)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids[:tokens]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def chat(messages: list[Message], *, max_tokens: int) -> dict[str, Any]:
    """Body of a chat completion; the client adds model and streaming."""
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0}


def question(document: str, text: str) -> Message:
    """A turn that asks about a document."""
    return user(f"{document}\n\n{text}")
