"""Recorded traffic as clients: Mooncake request traces and agentic session traces.

Both name blocks of prompts by ids and carry no text; equal ids become equal made-up tokens. A file with one
mistake is refused with its line: a what-if over half a trace would answer another question.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epp.core.errors import ConfigError
from simulator.clients import Stage
from simulator.fleet import Fleet
from simulator.prompts import Content, random_tokens
from simulator.requests import Record

MOONCAKE_BLOCK_TOKENS = 512
MAX_PROMPT_TOKENS = 4 << 20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `blocks` name the prompt, the last one may be cut; `at_s` counts from the start."""

    at_s: float
    blocks: tuple[Hashable, ...]
    block_tokens: int
    prompt_tokens: int
    output_tokens: int
    session: str = ""  # requests of a session follow each other; empty: sent at `at_s` whatever happens
    think_s: float = 0.0  # after the answer before


class TokenBook:
    """Made-up tokens of named blocks: the same name, the same tokens."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"book {seed}")
        self._known: dict[Hashable, array[int]] = {}

    def text(self, request: TraceRequest) -> array[int]:
        """Tokens of the prompt, then of its answer."""
        found = array("I")
        for name in request.blocks:
            tokens = self._known.get(name)
            if tokens is None:
                tokens = self._known[name] = random_tokens(self._rng, request.block_tokens)
            found.extend(tokens)
        missing = request.prompt_tokens - len(found)
        if missing > 0:  # a tail that the trace does not name: nobody shares it
            found.extend(random_tokens(self._rng, missing))
        del found[request.prompt_tokens :]
        found.extend(random_tokens(self._rng, request.output_tokens))
        return found


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """Requests without a session are sent at their time; a session's next one after its last answer."""

    requests: tuple[TraceRequest, ...]
    speed: float = 1.0  # 2: arrivals twice as fast
    timeout_s: float | None = None
    max_think_s: float = math.inf

    def run(self, fleet: Fleet, seed: int) -> list[Stage]:
        stage = Stage("trace", fleet.timeline.now_s)
        book = TokenBook(seed)
        sessions: dict[str, list[TraceRequest]] = {}
        for request in self.requests:
            if request.session:
                sessions.setdefault(request.session, []).append(request)
            else:
                fleet.timeline.at(request.at_s / self.speed, self._send, fleet, stage, book, request, [])
        for first, *rest in sessions.values():
            fleet.timeline.at(first.at_s / self.speed, self._send, fleet, stage, book, first, rest)
        fleet.run()
        return [stage]

    def _send(
        self,
        fleet: Fleet,
        stage: Stage,
        book: TokenBook,
        request: TraceRequest,
        rest: list[TraceRequest],
    ) -> None:
        def then(record: Record) -> None:
            if rest and not record.failed:
                pause_s = min(rest[0].think_s, self.max_think_s)
                fleet.timeline.after(pause_s, self._send, fleet, stage, book, rest[0], rest[1:])

        content = Content.of(book.text(request), fleet.shape.shape.block_tokens)
        stage.records.append(
            fleet.submit(
                content,
                request.prompt_tokens,
                request.output_tokens,
                tag=request.session,
                timeout_s=self.timeout_s,
                then=then,
            )
        )


# --- readers ------------------------------------------------------------------------------------------
def read_trace(path: Path, max_requests: int | None = None) -> tuple[TraceRequest, ...]:
    """A Mooncake JSONL file, an agentic session file, or a directory of session files.

    Raises:
        ConfigError: not one of these, or a line that does not say what it must; names file and line.
    """
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise ConfigError(f"{path}: no *.json session files")
        found = [request for file in files for request in _session(file, _json(file, file.read_text()))]
    else:
        try:
            text = path.read_text()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        if path.suffix == ".json":
            found = list(_session(path, _json(path, text)))
        else:
            found = [_mooncake(f"{path}:{n}", line) for n, line in enumerate(text.splitlines(), 1) if line]
    if not found:
        raise ConfigError(f"{path}: no request")
    return tuple(found[:max_requests])


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _mooncake(where: str, line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    fields = _fields(where, row, "timestamp", "input_length", "output_length")
    ids = row.get("hash_ids")
    if not isinstance(ids, list):
        raise ConfigError(f"{where}: hash_ids is missing")
    return TraceRequest(
        at_s=fields[0] / 1e3,
        blocks=tuple(ids),
        block_tokens=MOONCAKE_BLOCK_TOKENS,
        prompt_tokens=max(1, int(fields[1])),
        output_tokens=max(1, int(fields[2])),
    )


def _session(path: Path, raw: Any) -> Iterable[TraceRequest]:
    where = str(path)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("requests"), list):
        raise ConfigError(f"{where}: expected an object with `requests`")
    (block_tokens,) = _fields(where, raw, "block_size")
    name = str(raw.get("id", path.stem))
    shared = raw.get("hash_id_scope") != "local"
    for number, row in enumerate(raw["requests"]):
        here = f"{where}: requests[{number}]"
        if isinstance(row, Mapping) and "in" not in row:
            continue  # a sub-agent's group: what it asked of the model is not in the main session
        at_s, prompt, output = _fields(here, row, "t", "in", "out")
        ids = row.get("hash_ids", [])
        yield TraceRequest(
            at_s=at_s,
            blocks=tuple(ids if shared else [(name, i) for i in ids]),
            block_tokens=int(block_tokens),
            prompt_tokens=max(1, int(prompt)),
            output_tokens=max(1, int(output)),
            session=name,
            think_s=float(row.get("think_time") or 0.0),
        )


def _fields(where: str, row: Any, *names: str) -> list[float]:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected an object")
    found = []
    for name in names:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
            raise ConfigError(f"{where}: {name}: expected a number of at least 0")
        found.append(float(value))
    return found


def fit_into(requests: Iterable[TraceRequest], max_tokens: int) -> tuple[tuple[TraceRequest, ...], int]:
    """Requests that fit an engine's context, and how many do not. A session ends where it has outgrown it."""
    kept: list[TraceRequest] = []
    ended: set[str] = set()
    dropped = 0
    for request in requests:
        too_long = request.prompt_tokens + request.output_tokens > max_tokens
        if too_long or request.session in ended:
            dropped += 1
            if request.session:
                ended.add(request.session)
        else:
            kept.append(request)
    return tuple(kept), dropped


def from_zero(requests: tuple[TraceRequest, ...]) -> tuple[TraceRequest, ...]:
    """The same, with the first arrival at 0."""
    begin_s = min(r.at_s for r in requests)
    return tuple(replace(r, at_s=r.at_s - begin_s) for r in requests)
