"""A request handler that keeps books: what was decided, what was told of it afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from epp.core.errors import NoEndpoints, PickerError
from epp.core.types import Outcome
from epp.extproc import events as ev


class Saturated(PickerError):
    status = 429
    reason = "rejected-saturated"


@dataclass
class Bookkeeper:
    """Routes to what `x-pick` names in `targets` (a list: joined by `+`); other values provoke a fault."""

    targets: dict[str, str]
    heads: list[ev.RequestHead] = field(default_factory=list)
    bodies: list[bytes | None] = field(default_factory=list)
    decided: int = 0
    cancelled: int = 0
    first_tokens: Counter[object] = field(default_factory=Counter)
    finished_tokens: Counter[object] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)
    gate: asyncio.Event | None = None  # None: decide at once
    new_body: bytes | None = None
    rename_model: tuple[str, str] | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    waiting: int = 0
    _pending: set[asyncio.Task[None]] = field(default_factory=set)

    async def decide(self, head: ev.RequestHead, body: bytes | None) -> ev.Routing:
        self.heads.append(head)
        self.bodies.append(body)
        pick = head.headers.first("x-pick") or "a"
        if self.gate is not None:
            await self._wait(self.gate, stubborn=pick == "stubborn")
        if pick == "none":
            raise NoEndpoints("no endpoint is ready")
        if pick == "saturated":
            raise Saturated("try later")
        if pick == "crash":
            raise RuntimeError("secret detail")
        self.decided += 1
        token = self.decided
        names = [self.targets.get(name, self.targets["a"]) for name in pick.split("+")]
        return ev.Routing(
            ",".join(names),
            set_headers={"x-kvpull-decision-id": f"decision-{token}"},
            remove_headers=["x-kv-cache-source-host-port"],
            response_headers={"x-decided": str(token)},
            body=self.new_body,
            token=token,
            rename_model=self.rename_model,
        )

    async def _wait(self, gate: asyncio.Event, *, stubborn: bool) -> None:
        self.waiting += 1
        self._tell()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            if not stubborn:
                raise
        finally:
            self.waiting -= 1
            self._tell()

    def first_token(self, token: object) -> None:
        self.first_tokens[token] += 1
        self._tell()

    def finished(self, token: object, outcome: Outcome) -> None:
        self.finished_tokens[token] += 1
        self.outcomes.append(outcome)
        self._tell()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    def assert_books_balance(self) -> None:
        """Every decision was finished exactly once, and nothing else was."""
        assert self.finished_tokens == Counter(range(1, self.decided + 1))
        assert set(self.first_tokens) <= set(self.finished_tokens)
        assert all(count == 1 for count in self.first_tokens.values())

    def _tell(self) -> None:
        task = asyncio.create_task(self._notify())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
