"""A table of a page that says which test shows a case names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
_NAMED = re.compile(r"`(?:[a-z_]+/)?(test_\w+)(?:: (\w+))?`((?:, `(?!test_)[a-z]\w+`)*)")


def named(page: str) -> list[tuple[str, str]]:
    """File and test, in the order of the rows; a test's name alone belongs to the file before it."""
    rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    found = []
    for stem, first, more in _NAMED.findall("\n".join(rows)):
        found += [(stem, test) for test in (first, *re.findall(r"`(\w+)`", more))]
    return found


@pytest.mark.parametrize(("stem", "test"), named("kubernetes.md"))
def test_the_named_test_exists(stem: str, test: str) -> None:
    assert stem in FILES
    assert not test or re.search(rf"def test_{test}\(", FILES[stem].read_text()), test


def test_the_cases_are_all_there() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert [f"S-G{n:02}" for n in range(1, 14) if f"S-G{n:02}" not in page] == []
    assert len(named("kubernetes.md")) > 25
