"""Which tokens the emulated model answers with.

Only whole words with a leading blank that the tokenizer maps back to the same single token: then an
answer that comes back as text in the next turn has the very tokens whose KV was kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol

_WORD: Final = re.compile(r" [a-z]{2,}")
_FEWEST: Final = 64


class Tokenizer(Protocol):
    """The part of `epp.request.local_tokenizer.LocalTokenizer` that is needed here."""

    @property
    def vocab_size(self) -> int: ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class VocabularyError(ValueError):
    """The tokenizer has too few words to answer with."""


def answer_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the words, ascending. Blocking: decodes the whole vocabulary once.

    Raises:
        VocabularyError: fewer than 64 entries qualify.
    """
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    words = [token for token, text in texts.items() if _WORD.fullmatch(text)]
    encoded = tokenizer.encode_batch([texts[token] for token in words], add_special_tokens=False)
    stable = tuple(token for token, ids in zip(words, encoded, strict=True) if ids == [token])
    if len(stable) < _FEWEST:
        raise VocabularyError(f"the tokenizer has {len(stable)} single-token words; {_FEWEST} are needed")
    return stable
