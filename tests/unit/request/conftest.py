"""The shipped tokenizer, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.request.local_tokenizer import LocalTokenizer

TOKENIZER_DIRECTORY = Path(__file__).resolve().parents[3] / "config" / "tokenizer"


@pytest.fixture(scope="session")
def tokenizer() -> LocalTokenizer:
    return LocalTokenizer.load(TOKENIZER_DIRECTORY)
