"""Fill in the tables of `docs/migration.md`: `python -m deploy.helm.migration`.

Whether a flag, plugin or value of llm-d-router exists here is asked of the parsers, the registry and the
chart's values; what to use instead of one that is refused is the sentence that its refusal says. So whoever
adds a plugin runs this and changes nothing by hand: a type that has no row gets one. What a person writes is
the note, which may begin with `renamed:` or `dropped:`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.helm import describe, flag_schemas
from epp.plugins.not_supported import NOT_SUPPORTED
from epp.plugins.registry import PLUGIN_TYPES
from sidecar.flags import _UNSUPPORTED, _UNSUPPORTED_PREFIXES

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \|(?P<status>[^|]*)\|(?P<note>[^|]*)\|$")
_MULTICLUSTER = "multicluster-"  # a family: one sentence for all of them is enough


@dataclass(frozen=True, slots=True)
class Known:
    """What exists here, and what to say of names that are refused. `listed`: all of it has to have a row."""

    names: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    listed: bool = False

    def row(self, name: str, note: str) -> str:
        """A table's row for the name."""
        if name in self.names:
            status = "same"
        elif name in self.refused:
            status, note = "refused", self.refused[name]
        else:
            word = note.partition(":")[0]
            status = word if word in ("renamed", "dropped") else "**not yet**"
        return f"| `{name}` | {status} | {note} |".replace("|  |", "| |")

    def missing(self, seen: set[str]) -> list[str]:
        """Names that have no row."""
        if not self.listed:
            return []
        wanted = self.names | {name for name in self.refused if not name.startswith(_MULTICLUSTER)}
        return sorted(wanted - seen)


def known_names() -> dict[str, Known]:
    """By the heading of the table."""
    refused = {f"--{name}": text for name, (text, _) in _UNSUPPORTED.items()}
    refused |= {f"--{prefix}*": text for prefix, text in _UNSUPPORTED_PREFIXES.items()}
    return {
        "Flags of the picker": Known(_flags(flag_schemas.epp_parser())),
        "Flags of the sidecar": Known(_flags(flag_schemas.sidecar_parser()), refused),
        "Plugins": Known(_REFERENCE_TYPES, NOT_SUPPORTED, listed=True),
        "Values of the charts": Known(frozenset(_value_names())),
    }


# ours that the reference does not have, and that nobody brings along
_REFERENCE_TYPES = frozenset(name for name, row in PLUGIN_TYPES.items() if not row.experimental)


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
    """The page with every row as it is now."""
    known, lines = known_names(), []
    heading, seen, inside = "", set[str](), False
    for line in text.splitlines():
        row = _ROW.match(line)
        if line.startswith("## "):
            heading, seen = line.removeprefix("## "), set()
        if row is not None and heading in known:
            inside = True
            seen.add(row["name"])
            line = known[heading].row(row["name"], row["note"].strip())
        elif inside:  # the line after a table's last
            inside = False
            lines += [known[heading].row(name, "") for name in known[heading].missing(seen)]
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
