"""One request inside the engine: what was asked, how far it is, and what is reported of it.

Values and small state only; the scheduler and the core move requests along. Life of a request:
waiting -> preparing (a pull, a restore) -> running -> finished; `abandon` may come at any time.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field, fields
from typing import Any

from deploy.local.engine.content import SeedChain
from deploy.local.engine.hashing import Block
from deploy.local.engine.kv_params import NO_TRANSFER, TransferParams


class State(enum.StrEnum):
    WAITING = "waiting"
    PREPARING = "preparing"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True)
class Report:
    """What happened to a request, in tokens and bytes: the answer of /debug/requests/<id>."""

    request_id: str
    state: State = State.WAITING
    prompt_tokens: int = 0
    computed_tokens: int = 0  # prompt tokens computed here
    device_hit_tokens: int = 0
    restored_tokens: int = 0  # from the own CPU tier
    pulled_tokens: int = 0  # from a peer, by remote_kv_source
    pulled_bytes: int = 0
    handed_over_tokens: int = 0  # from the prefill leg, by remote_prefiller or do_remote_prefill
    handed_over_bytes: int = 0
    supplied_tokens: int = 0  # announced to the decode leg
    output_tokens: int = 0
    corrupt_blocks: int = 0
    asked_blocks: int = 0  # what the peer was asked for
    pull_reason: str | None = None  # None: no peer was named; "ok" or why it gave less than asked
    pull_detail: str = ""
    pull_ms: float | None = None
    source: str | None = None
    kv_request_id: str | None = None
    ttft_ms: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed here."""
        return self.device_hit_tokens + self.restored_tokens + self.pulled_tokens + self.handed_over_tokens

    def as_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"state": self.state.value, "cached_tokens": self.cached_tokens}


@dataclass(frozen=True, slots=True)
class Spec:
    """What the API layer hands to the engine. `prompt` is not empty and, with `max_tokens`, fits."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stops_early: bool = False  # no length was asked for: the emulated model ends by itself
    salt: str | None = None
    lora_name: str | None = None
    transfer: TransferParams = NO_TRANSFER


class Request:
    """State of one request; mutated by the engine's loop only."""

    def __init__(self, spec: Spec, chain: list[Block], seeds: SeedChain, now_s: float) -> None:
        self.spec = spec
        self.chain = chain  # full blocks of `tokens`, named
        self.seeds = seeds  # of `tokens`
        self.tokens: list[int] = list(spec.prompt)  # prompt, then answer
        self.computed = 0  # leading tokens whose KV is in the device tier
        self.slots: list[int] = []  # device slots of the whole sequence, reserved at admission
        self.offloaded = 0  # leading blocks whose place in the CPU tier has been looked after
        self.summed = 0  # leading tokens that `total` covers
        self.total = 0  # digest of the bytes read
        self.stop_after = 0  # answer length; decided with the first token
        self.arrived_s = now_s
        self.report = Report(spec.request_id, prompt_tokens=len(spec.prompt))
        self.supply_id: str | None = None  # prefill leg: where the decode leg will look
        self.supplied = False
        self.kv_response: dict[str, Any] | None = None  # for the response of a nixlv2 prefill leg
        self.finish_reason: str | None = None
        self.gone = asyncio.Event()  # the client has left
        self.ended = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def prompt_tokens(self) -> int:
        return len(self.spec.prompt)

    @property
    def prefilled(self) -> bool:
        return self.computed >= self.prompt_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.report.state in (State.FINISHED, State.ABORTED)

    def reusable_blocks(self, block_size: int) -> int:
        """Prompt blocks that may come from a cache: at least one token is always computed."""
        return (self.prompt_tokens - 1) // block_size

    def reserved_blocks(self, block_size: int) -> int:
        """Blocks of prompt and longest answer; the last token of an answer is never computed."""
        return -(-(self.prompt_tokens + self.spec.max_tokens - 1) // block_size)

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self.report.output_tokens += 1
        self._news.set()

    def finish(self, state: State) -> None:
        """Nothing more will come; wakes the reader."""
        self.report.state = state
        self.ended.set()
        self._news.set()

    async def more(self, seen: int) -> list[int]:
        """Answer tokens from `seen` on: waits for at least one; empty means that the answer ended."""
        while self.report.output_tokens <= seen and not self.finished:
            self._news.clear()
            await self._news.wait()
        return self.tokens[self.prompt_tokens + seen :]


@dataclass(slots=True)
class RequestLog:
    """Reports of the last requests, the oldest dropped first."""

    limit: int = 1000
    _reports: dict[str, Report] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        self._reports.pop(report.request_id, None)
        self._reports[report.request_id] = report
        while len(self._reports) > self.limit:
            del self._reports[next(iter(self._reports))]

    def get(self, request_id: str) -> Report | None:
        return self._reports.get(request_id)
