"""docs/conformance.md names the 14 scenarios, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
PAGE = (TESTS.parent / "docs" / "conformance.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| [A-Z]", line)]


def test_all_scenarios_are_listed_once() -> None:
    names = [name for row in ROWS for name in re.findall(r"\w+", row[0])]
    assert len(names) == len(set(names)) == 14


def test_what_shows_them_exists() -> None:
    named = re.findall(r"`((?:unit|integration)/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 8
    for file, test in named:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, (file, test)
