"""Documents have the token length that the verdicts count on."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from deploy.local.scenario.texts import Texts
from deploy.local.spec import FleetSpec

_DIRECTORY = FleetSpec().tokenizer


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(_DIRECTORY)


@pytest.mark.parametrize("tokens", [1, 17, 2_304, 49_152])
def test_document_has_exactly_so_many_tokens(texts: Texts, tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(_DIRECTORY / "tokenizer.json"))
    text = texts.document("a", tokens)
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == tokens


def test_seed_decides_the_text_from_the_first_block_on(texts: Texts) -> None:
    assert texts.document("a", 200) == Texts(_DIRECTORY).document("a", 200)
    assert texts.document("a", 200)[:60] != texts.document("b", 200)[:60]
