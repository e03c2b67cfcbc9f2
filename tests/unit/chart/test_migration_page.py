"""docs/migration.md: what is the same and what is missing is what parsers, registry and values say."""

from __future__ import annotations

import re

import pytest

from deploy.helm import migration
from epp.plugins.registry import PLUGIN_TYPES

PAGE = migration.PAGE.read_text()


def rows(heading: str) -> dict[str, tuple[str, str]]:
    """Status and note of every name in a section."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `([^`]+)` \| (\S[^|]*?) \|([^|]*)\|$", section, re.MULTILINE)
    return {name: (status, note.strip()) for name, status, note in found}


def test_the_page_is_fresh() -> None:
    """Else run `python -m deploy.helm.migration`."""
    assert migration.filled(PAGE) == PAGE


@pytest.mark.parametrize("heading", migration.known_names())
def test_every_status_is_true(heading: str) -> None:
    known = migration.known_names()[heading]
    assert len(rows(heading)) > 20
    for name, (status, note) in rows(heading).items():
        assert status in ("same", "renamed", "dropped", "refused", "**not yet**"), name
        assert (status == "same") is (name in known.names), name
        assert (status == "refused") is (name in known.refused), name
        for other in re.findall(r"`(--[a-z-]+)`", note):
            assert other in known.names | migration.known_names()["Flags of the picker"].names, (name, other)


def test_every_plugin_of_ours_is_on_the_page() -> None:
    ours = {name for name, row in PLUGIN_TYPES.items() if row.experimental}
    assert PLUGIN_TYPES.keys() - ours <= rows("Plugins").keys()
    assert not ours & rows("Plugins").keys()


def test_a_plugin_that_is_added_changes_its_row_or_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    more = migration.Known(
        migration._REFERENCE_TYPES | {"models-data-extractor", "brand-new"}, {}, listed=True
    )
    monkeypatch.setattr(migration, "known_names", lambda: {"Plugins": more})
    page = migration.filled(PAGE)
    assert "| `models-data-extractor` | same | " in page
    assert page.partition("## Values")[0].rstrip().endswith("| `brand-new` | same | |")
    assert migration.filled(page) == page
