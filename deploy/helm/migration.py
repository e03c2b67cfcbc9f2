"""Fill in the second column of the tables in `docs/migration.md`: `python -m deploy.helm.migration`.

Whether a flag, plugin or value of llm-d-router exists here is asked of the parsers, the registry and the
chart's values; what a note begins with says the rest (`renamed:`, `dropped:`). So whoever adds a plugin runs
this and changes nothing by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from deploy.helm import describe, flag_schemas
from epp.plugins.registry import PLUGIN_TYPES

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \|(?P<status>[^|]*)\|(?P<note>[^|]*)\|$")


def known_names() -> dict[str, frozenset[str]]:
    """What exists here, by the heading of the table that lists it."""
    return {
        "Flags of the picker": _flags(flag_schemas.epp_parser()),
        "Flags of the sidecar": _flags(flag_schemas.sidecar_parser()),
        "Plugins": frozenset(PLUGIN_TYPES),
        "Values of the charts": frozenset(_value_names()),
    }


def _flags(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Without those that are only known to be refused."""
    known = flag_schemas.names(parser)
    return frozenset(f"--{name}" for name, action in known.items() if action.help is not argparse.SUPPRESS)


def _value_names() -> Iterator[str]:
    """Every value and every group of values."""
    pending = list(describe.read_values((describe.CHART / "values.yaml").read_text()))
    while pending:
        value = pending.pop()
        yield ".".join(value.path)
        pending += value.children


def filled(text: str) -> str:
    """The page with the status of every row as it is now."""
    known = known_names()
    heading, lines = "", []
    for line in text.splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        row = _ROW.match(line)
        if row is not None and heading in known:
            note = row["note"].strip()
            line = f"| `{row['name']}` | {_status(row['name'] in known[heading], note)} | {note} |"
            line = line.replace("|  |", "| |")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _status(exists: bool, note: str) -> str:
    if exists:
        return "same"
    word = note.partition(":")[0]
    return word if word in ("renamed", "dropped") else "**not yet**"


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
