"""The router against what a real vLLM 0.32 said about the corpus (tests/data/parity), id by id.

tests/engine checks that the record is true; here no engine is needed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import record
from tests.parity.corpus import all_cases, cases
from tests.parity.families import FAMILIES, by_name, write_family
from tests.parity.ours import open_router_tokeniser, router_says

NAMES = [family.name for family in FAMILIES]


async def router_answers(family: str, directory: Path) -> dict[str, record.Answer]:
    tokeniser = open_router_tokeniser(directory)
    answers: dict[str, record.Answer] = {
        case.key: await router_says(tokeniser, case) for case in cases(family)
    }
    await tokeniser.aclose()
    return answers


@pytest.mark.parametrize("family", NAMES)
async def test_token_ids_are_the_engines(family: str, tmp_path: Path) -> None:
    write_family(by_name(family), tmp_path)
    digest, engine = record.read_record(family)
    assert digest == record.digest_of(tmp_path, cases(family)), (
        "record anew: KVPULL_RECORD_PARITY=1 make test-engine"
    )
    found = record.compare(engine, await router_answers(family, tmp_path))
    assert (found.wrong, found.unexpected) == ([], [])
    assert len(found.same) >= 90


def test_the_corpus_covers_what_it_claims() -> None:
    corpus = all_cases()
    assert len({case.key for case in corpus}) == len(corpus)
    answered = [
        key
        for name in NAMES
        for key, answer in record.read_record(name)[1].items()
        if answer != record.REFUSED
    ]
    shapes = {"completions", "chat/completions", "responses", "messages"}
    for shape in shapes:
        assert sum(key.split("/", 1)[1].startswith(shape) for key in answered) >= 80
    assert len(answered) >= 1000
    assert len(NAMES) >= 6


async def test_a_token_that_differs_is_found(tmp_path: Path) -> None:
    """Control: the comparison notices one wrong id, a missing answer, and a reason that is not listed."""
    write_family(by_name("gemma"), tmp_path)
    _, engine = record.read_record("gemma")
    router = await router_answers("gemma", tmp_path)
    answered = [key for key, answer in engine.items() if isinstance(answer, list) and answer == router[key]]
    changed, missing, *_ = answered
    ids = router[changed]
    assert isinstance(ids, list)
    router |= {changed: [*ids[:-1], ids[-1] + 1], missing: "late"}
    found = record.compare(engine, router)
    assert found.wrong == [changed]
    assert found.unexpected == [f"{missing}: late"]


async def test_another_template_does_not_pass(tmp_path: Path) -> None:
    """Control: one character more in a template and no chat of the record matches."""
    write_family(by_name("phi"), tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("." + template.read_text(encoding="utf-8"), encoding="utf-8")
    _, engine = record.read_record("phi")
    found = record.compare(engine, await router_answers("phi", tmp_path))
    assert {key.split("/")[1] for key in found.same} == {"completions"}
    assert len(found.wrong) >= 60
