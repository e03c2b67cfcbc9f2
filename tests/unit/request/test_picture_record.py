"""The router's tokens in front of pictures and sounds, against the real processors of ten kinds of models.

tests/data/parity/pictures.tsv says what vLLM 0.32 made of each request, up to its first item.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.request.items import KNOWN_KINDS
from tests.parity import record
from tests.parity.ours import open_router_tokeniser, router_says
from tests.parity.pictures import KINDS, RECORD, Kind, picture_cases, write_kind

DIGEST, ENGINE = record.read_record(RECORD)


def test_every_kind_that_is_matched_was_asked() -> None:
    assert {kind.name for kind in KINDS} == KNOWN_KINDS
    assert {key.partition("/")[0] for key in ENGINE} == KNOWN_KINDS


def test_the_record_is_of_these_requests(tmp_path: Path) -> None:
    assert picture_digest(tmp_path) == DIGEST, "record anew: tests/engine/record_pictures.py"


def picture_digest(root: Path) -> str:
    for kind in KINDS:
        write_kind(kind, root / kind.name)
    return record.digest_of_all((root / kind.name, picture_cases(kind)) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_tokens_in_front_of_an_item_are_the_engine_s(kind: Kind, tmp_path: Path) -> None:
    write_kind(kind, tmp_path)
    tokeniser = open_router_tokeniser(tmp_path)
    corpus = picture_cases(kind)
    router = {case.key: await router_says(tokeniser, case) for case in corpus}
    await tokeniser.aclose()
    found = record.compare({case.key: ENGINE[case.key] for case in corpus}, router)
    assert (found.wrong, found.unexpected) == ([], [])
    assert len(found.same) == len(corpus) >= (10 if kind.modality == "audio" else 18)


async def test_one_token_more_is_found(tmp_path: Path) -> None:
    """Control: the item's own first token is not in front of it."""
    kind = KINDS[0]
    write_kind(kind, tmp_path)
    tokeniser = open_router_tokeniser(tmp_path)
    case = picture_cases(kind)[1]
    ids = await router_says(tokeniser, case)
    await tokeniser.aclose()
    assert isinstance(ids, list)
    assert record.compare({case.key: ENGINE[case.key]}, {case.key: [*ids, ids[0]]}).wrong == [case.key]
