"""`kvpull replay`: what would other thresholds have decided about a recorded ledger?

Runs the product's own `choose_source` on the inputs that were recorded; there is no second rule here. The
destination stays the recorded one. A record keeps the deepest eight holders: where more tie within a
block of the best, whether there is a pull is exact and which of the equals is sampled is not; such
decisions are counted as inexact and never as a difference of source alone. Pulls outstanding are those
recorded, although another past would have made others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from epp.core.errors import ConfigError
from epp.core.kv_source import choose_source
from epp.core.thresholds import ROLE_LABEL, PolicyTable, PullThresholds
from epp.core.types import SchedulingRequest, SourceChoice, SourceReason
from epp.ops.show_thresholds import read_files
from epp.ops.text import printable
from epp.telemetry.decision_json import FORMAT, RuleInputs, read_inputs
from epp.thresholds.merge import merge_texts

MAX_LINE_BYTES: Final = 1 << 20
# of the prompt and the index, not of thresholds: no document changes them
_GIVEN = frozenset({SourceReason.NO_TOKENS, SourceReason.NO_CLAIM, SourceReason.DESTINATION_UNKNOWN})


@dataclass(frozen=True, slots=True)
class Redecided:
    """One recorded decision and what the other thresholds make of it."""

    decision_id: str
    request_id: str
    was_reason: str
    was_source: str | None
    was_tokens: int
    reason: str
    source: str | None
    tokens: int
    exact: bool

    @property
    def differs(self) -> bool:
        if not self.exact:
            return (self.was_source is None) != (self.source is None)
        return (self.was_reason, self.was_source) != (self.reason, self.source)


@dataclass(slots=True)
class Summary:
    """Counts over a ledger."""

    decisions: int = 0
    inexact: int = 0
    unreadable: int = 0
    differing: int = 0
    was_pulls: int = 0
    pulls: int = 0
    was_tokens: int = 0
    tokens: int = 0
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, row: Redecided) -> None:
        self.decisions += 1
        self.inexact += not row.exact
        self.differing += row.differs
        self.was_pulls += row.was_source is not None
        self.pulls += row.source is not None
        self.was_tokens += row.was_tokens
        self.tokens += row.tokens
        if row.differs:
            self.changes[row.was_reason, row.reason] += 1


def replay(arguments: argparse.Namespace) -> int:
    """0: at least one decision was decided again; 1: none could be."""
    merged = merge_texts(read_files(arguments.thresholds))
    delta: int | None = arguments.producer_delta
    if delta is not None and delta < 1:
        raise ConfigError("--producer-delta: must be at least 1")
    table = PolicyTable(delta, configured=True, thresholds=PullThresholds(merged.rules, 1))
    summary = Summary()
    shown: list[Redecided] = []
    for row in redecide_files(arguments.ledger, table, summary):
        if row.differs and len(shown) < arguments.show:
            shown.append(row)
    for warning in merged.warnings:
        print(f"kvpull: warning: {warning}", file=sys.stderr)
    print(json.dumps(_as_json(summary, shown)) if arguments.json else "\n".join(_lines(summary, shown)))
    return 0 if summary.decisions else 1


def redecide_files(paths: Iterable[Path], table: PolicyTable, summary: Summary) -> Iterator[Redecided]:
    """Every readable decision, in the order of the files. Raises ConfigError: a file cannot be read."""
    for path in paths:
        try:
            with path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    row = _redecide_line(line, table)
                    if row is None:
                        summary.unreadable += 1
                    else:
                        summary.add(row)
                        yield row
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error


def _redecide_line(line: bytes, table: PolicyTable) -> Redecided | None:
    try:
        record = json.loads(line)
        if record["format"] > FORMAT:
            return None
        return redecide(record, table)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def redecide(record: Mapping[str, Any], table: PolicyTable) -> Redecided:
    """Decide a recorded decision again.

    Raises:
        KeyError, TypeError, ValueError: it is no record, or one without inputs.
    """
    inputs = read_inputs(record)
    choice = _choose(record, inputs, table)
    recorded, source = record["source"], choice.source
    return Redecided(
        str(record["decision_id"]),
        str(record["request_id"]),
        SourceReason(record["reason"]).value,
        f"{recorded['pod']}/{recorded['rank']}" if recorded else None,
        int(recorded["gain_tokens"]) if recorded else 0,
        choice.reason.value,
        str(source.endpoint.id) if source else None,
        source.gain_tokens if source else 0,
        _exact(choice, inputs),
    )


def _choose(record: Mapping[str, Any], inputs: RuleInputs, table: PolicyTable) -> SourceChoice:
    tokens = record["prompt_tokens"]
    request = SchedulingRequest(
        str(record["request_id"]),
        str(record["model"]),
        None if tokens is None else range(int(tokens)),
    )
    computing = inputs.computing
    rows = {row.endpoint.id: row for row in (*inputs.holders, computing)}
    policy = table.policy_for(request.model, computing.endpoint.labels.get(ROLE_LABEL))
    choice = choose_source(
        request, [rows[key] for key in sorted(rows)], computing, policy, inputs.refused_peers
    )
    given = SourceReason(record["reason"])
    if given in _GIVEN and choice.reason not in (SourceReason.SWITCHED_OFF, SourceReason.NO_THRESHOLD):
        return SourceChoice(None, given)
    return choice


def _exact(choice: SourceChoice, inputs: RuleInputs) -> bool:
    """Whether the holders that were not recorded could not have been sampled."""
    if inputs.holders_total <= len(inputs.holders) or not choice.holders:
        return True
    shallowest = inputs.holders[-1].match
    best_tokens = max((tokens for _, tokens, _ in choice.considered), default=0)
    return shallowest.servable_tokens + shallowest.block_size_tokens < best_tokens


def _as_json(summary: Summary, shown: Iterable[Redecided]) -> dict[str, Any]:
    names = ("decisions", "differing", "inexact", "unreadable", "was_pulls", "pulls", "was_tokens", "tokens")
    return {name: getattr(summary, name) for name in names} | {
        "changes": [[was, now, count] for (was, now), count in summary.changes.most_common()],
        "differences": [{name: getattr(row, name) for name in Redecided.__slots__} for row in shown],
    }


def _lines(summary: Summary, shown: Iterable[Redecided]) -> Iterator[str]:
    yield f"{summary.decisions} decisions, {summary.differing} decided differently, {summary.inexact} inexact"
    if summary.unreadable:
        yield f"{summary.unreadable} lines could not be read"
    yield f"pulls {summary.was_pulls} -> {summary.pulls}"
    yield f"tokens promised {summary.was_tokens} -> {summary.tokens}"
    for (was, now), count in summary.changes.most_common():
        yield f"  {count:>7}  {was} -> {now}"
    for row in shown:
        before = f"{row.was_reason} {row.was_source or ''}".strip()
        after = f"{row.reason} {row.source or ''}".strip()
        tokens = f"{row.was_tokens} -> {row.tokens} tokens"
        yield printable(f"{row.decision_id} {row.request_id}: {before} -> {after}, {tokens}")
