"""The picker's own decision ledger as a trace: arrivals and lengths as recorded, prefixes as far as it tells.

A ledger names no prompts. It does say how many tokens of each one the candidates held, and how many the
engine then reused. So a request is taken to begin with the text of the latest earlier request that ran on its
deepest holder and is long enough; where there is none (the prefix is older than the ledger) it has a text of
its own and is computed here once more. Which earlier one it was, what answers left in caches and the pauses
between turns of a session are not in a ledger: requests are sent at their recorded times. `notes` counts all
of that for the report.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epp.core.errors import ConfigError
from epp.telemetry.decision_json import FORMAT
from simulator.traces import MAX_PROMPT_TOKENS, TraceRequest

BLOCK_TOKENS = 64
_REMEMBERED = 4096  # earlier requests of an endpoint


@dataclass(frozen=True, slots=True)
class _Row:
    """One finished decision."""

    at_s: float
    prompt_tokens: int
    output_tokens: int | None
    computing: str
    holder: str
    held_tokens: int


@dataclass(slots=True)
class Ledger:
    """Requests in the order of their arrival, and what had to be assumed."""

    requests: tuple[TraceRequest, ...]
    notes: dict[str, int] = field(default_factory=dict)


def is_ledger(path: Path) -> bool:
    """Whether the file's first line is a decision record."""
    if path.is_dir() or path.suffix not in (".jsonl", ".json", ""):
        return False
    try:
        with path.open() as file:
            row = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return False
    return isinstance(row, Mapping) and "decision_id" in row


def read_ledger(path: Path, max_requests: int | None = None) -> Ledger:
    """Raises ConfigError for a newer format or a record that lacks something, naming its line. Half lines (a
    process that died while it wrote) are left out and counted."""
    torn = 0
    rows: list[_Row] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError:
            torn += 1
            continue
        rows.append(_row(f"{path}:{number}", raw))
    if not rows:
        raise ConfigError(f"{path}: no request")
    rows.sort(key=lambda row: row.at_s)  # records are written when requests have ended
    rows = rows[:max_requests]
    requests, unknown = _requests(rows)
    notes = {
        "prefixes taken from the latest fitting request on the deepest holder": sum(
            r.held_tokens >= BLOCK_TOKENS for r in rows
        )
        - unknown,
        "prefixes older than the ledger (computed once more)": unknown,
        "answers of unknown length (taken as the mean)": sum(r.output_tokens is None for r in rows),
        "half lines left out": torn,
    }
    return Ledger(requests, {f"ledger: {name}": count for name, count in notes.items()})


def _row(where: str, raw: Any) -> _Row:
    try:
        if raw["format"] > FORMAT:
            raise ConfigError(f"{where}: format {raw['format']} is newer than this version's {FORMAT}")
        at_s, prompt_tokens = float(raw["decided_unix_s"]), int(raw["prompt_tokens"])
        outcome = raw.get("outcome") or {}
        answer = outcome.get("completion_tokens")
        computing = str(raw["computing"])
        held_by = [*_held(raw), (computing, int(outcome.get("cached_tokens") or 0))]
        holder, held = max(held_by, key=lambda pair: pair[1])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: no decision record: {type(error).__name__}: {error}") from error
    if not 0 <= prompt_tokens <= MAX_PROMPT_TOKENS:
        raise ConfigError(f"{where}: prompt_tokens {prompt_tokens}")
    prompt_tokens = max(1, prompt_tokens)
    return _Row(
        at_s, prompt_tokens, int(answer) if answer else None, computing, holder, min(held, prompt_tokens)
    )


def _held(raw: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Endpoints of a record and how many tokens of the prompt they held."""
    for row in raw["candidates"]:
        yield f"{row['pod']}/{row['rank']}", int(row["cached_tokens"])
    inputs = raw.get("inputs")
    for row in [inputs["computing"], *inputs["holders"]] if inputs else ():
        yield f"{row['pod']}/{row['rank']}", int(row["blocks"]) * int(row["block_size"])


def _requests(rows: list[_Row]) -> tuple[tuple[TraceRequest, ...], int]:
    """And how many prefixes are older than the ledger."""
    known = [row.output_tokens for row in rows if row.output_tokens is not None]
    mean = round(statistics.fmean(known)) if known else 1
    past: dict[str, list[tuple[Hashable, ...]]] = {}
    found, unknown = [], 0
    for number, row in enumerate(rows):
        wanted = row.held_tokens // BLOCK_TOKENS
        begun = (
            next((b for b in reversed(past.get(row.holder, [])) if len(b) >= wanted), None) if wanted else ()
        )
        unknown += begun is None
        head = tuple(begun or ())[:wanted]
        whole = -(-row.prompt_tokens // BLOCK_TOKENS)
        blocks = (*head, *((number, i) for i in range(len(head), whole)))
        there = past.setdefault(row.computing, [])
        there.append(blocks[: row.prompt_tokens // BLOCK_TOKENS])
        del there[:-_REMEMBERED]
        output = mean if row.output_tokens is None else row.output_tokens
        found.append(TraceRequest(row.at_s, blocks, BLOCK_TOKENS, row.prompt_tokens, max(1, output)))
    return tuple(found), unknown
