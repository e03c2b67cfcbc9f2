"""A table of a page that says which test shows a case names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES: dict[str, list[str]] = {}  # several folders have a file of the same name
for _path in (ROOT / "tests").rglob("test_*.py"):
    FILES.setdefault(_path.stem, []).append(_path.read_text())
_NAMED = re.compile(r"`(?:[a-z_]+/)?(test_\w+)(?:: (\w+))?`((?:, `(?!test_)[a-z]\w+`)*)")


def named(page: str) -> list[tuple[str, str]]:
    """File and test, in the order of the rows; a test's name alone belongs to the file before it."""
    rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    found = []
    for stem, first, more in _NAMED.findall("\n".join(rows)):
        found += [(stem, test) for test in (first, *re.findall(r"`(\w+)`", more))]
    return found


PAGES = ("kubernetes.md", "engine-plugin.md")


@pytest.mark.parametrize(("stem", "test"), [row for page in PAGES for row in named(page)])
def test_the_named_test_exists(stem: str, test: str) -> None:
    assert stem in FILES
    assert not test or re.search(rf"def test_{test}\(", "".join(FILES[stem])), test


def test_every_peer_transfer_case_is_there() -> None:
    page = (ROOT / "docs" / "engine-plugin.md").read_text()
    assert [f"S-E{n:02}" for n in range(1, 21) if f"S-E{n:02}" not in page] == []
    assert len(named("engine-plugin.md")) > 40


def test_the_cases_are_all_there() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert [f"S-G{n:02}" for n in range(1, 14) if f"S-G{n:02}" not in page] == []
    assert len(named("kubernetes.md")) > 25
