"""Shows a scenario's result: a table for a terminal, aligned text for a pipe, JSON for a program.

All three hold the same fields. Printing is this module's job and nobody else's in `deploy.local`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from deploy.local.scenario.row import Check, Row

_HEADINGS = (
    "#",
    "row",
    "destination",
    "source",
    "reason",
    "prompt",
    "cached",
    "pulled",
    "bytes in",
    "bytes out",
    "TTFT ms",
    "verdict",
)
_NUMERIC_FROM = 5
_NUMERIC_TO = 10


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts, in the order of the headings."""
    return (
        str(row.number),
        row.title,
        _destination(row),
        row.source or "-",
        row.reason,
        f"{row.prompt_tokens:,}",
        f"{row.cached_tokens:,}",
        f"{row.pulled_tokens:,}",
        f"{row.bytes_received:,}",
        f"{row.bytes_served:,}",
        f"{row.ttft_ms:,.0f}",
        row.verdict,
    )


def _destination(row: Row) -> str:
    return f"{row.destination} (prefill {row.prefill})" if row.prefill else row.destination


def plain_table(rows: Sequence[Row]) -> str:
    """The table without any terminal control, columns aligned."""
    lines = [_HEADINGS, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADINGS))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cell.rjust(widths[i]) if _is_number(i) else cell.ljust(widths[i]) for i, cell in enumerate(line)]
    return "  ".join(texts).rstrip()


def _is_number(column: int) -> bool:
    return column == 0 or _NUMERIC_FROM <= column <= _NUMERIC_TO


def rich_table(rows: Sequence[Row]) -> Table:
    table = Table(title="kvpull: pull instead of recompute", pad_edge=False)
    for i, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if _is_number(i) else "left", overflow="fold")
    for row in rows:
        table.add_row(*cells(row), style="bold red" if row.problems else None)
    return table


class Reporter:
    """Progress lines while the scenario runs, then the result."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        self._started_s = time.monotonic()

    def progress(self, text: str) -> None:
        """One line with the time since the start; shown at once."""
        self._stream.write(f"[{time.monotonic() - self._started_s:5.1f} s] {text}\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def row(self, row: Row) -> None:
        self.progress(
            f"row {row.number:2d} {row.title}: {_destination(row)} <- {row.source or '-'} ({row.reason}),"
            f" pulled {row.pulled_tokens:,} tokens, {row.ttft_ms:,.0f} ms: {row.verdict}"
        )
        self._problems(row.problems)

    def check(self, check: Check) -> None:
        self.progress(f"check {check.title}: {check.seen}: {check.verdict}")
        self._problems(check.problems)

    def result(self, rows: Sequence[Row], checks: Sequence[Check]) -> None:
        """The table, what was expected, and what came out otherwise."""
        self.say("")
        if self._console.is_terminal:
            self._console.print(rich_table(rows))
        else:
            self.say(plain_table(rows))
        self.say("\nExpected:")
        for row in rows:
            self.say(f"  {row.number:2d} {row.expected}")
        for check in checks:
            self.say(f"   + {check.title}: {check.expected}")
        wrong = sum(1 for row in rows if row.problems) + sum(1 for check in checks if check.problems)
        total = len(rows) + len(checks)
        self.say("")
        if wrong == 0:
            self.say(f"All {len(rows)} rows and {len(checks)} extra checks came out as expected.")
            return
        self.say(f"{wrong} of {total} did not come out as expected:")
        for row in rows:
            self._problems(row.problems, f"row {row.number}: ")
        for check in checks:
            self._problems(check.problems, f"{check.title}: ")

    def _problems(self, problems: Sequence[str], prefix: str = "") -> None:
        for problem in problems:
            self.say(f"          {prefix}{problem}")


def document(rows: Sequence[Row], checks: Sequence[Check]) -> dict[str, Any]:
    """What out/demo.json holds."""
    return {"rows": [row.as_json() for row in rows], "checks": [check.as_json() for check in checks]}


def write_json(path: Path, rows: Sequence[Row], checks: Sequence[Check]) -> None:
    """Replace `path` at once, so that a reader never sees half a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document(rows, checks), indent=2) + "\n")
    temporary.replace(path)
