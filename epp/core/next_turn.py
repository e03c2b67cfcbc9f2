"""Experimental: pull a session's prefix to where its next turn will run, before the turn arrives.

When an answer ends, the same prompt is placed again, as if it came back now. Where that is another endpoint
than the one that holds it, and the source rule would have it pull, an order says so: move these tokens'
blocks from here to there. Guarded, because moving at every turn's end makes a fleet slower: nothing is
ordered while the source waits, computes or serves another pull, nor towards an endpoint that is not less
busy than the holder, nor beyond the rates of orders and of bytes. Holds the tokens of running turns only,
within a bound. Orders are handed out; nothing is sent here. The answer's own tokens are not known to a
picker, so the prompt's blocks are all that moves.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_plugin.identity import EndpointId
from epp.core.types import Candidate, Outcome, SchedulingRequest, SourceChoice

# why nothing was ordered: label values
FAILED, OPEN, RATE, STAYS, NO_SOURCE = "failed", "session_open", "rate", "stays", "no_source"
SOURCE_BUSY, IN_FLIGHT, BYTES, NO_ADDRESS = "source_busy", "in_flight", "bytes", "no_address"
REASONS = (FAILED, OPEN, RATE, STAYS, NO_SOURCE, SOURCE_BUSY, IN_FLIGHT, BYTES, NO_ADDRESS)
MAX_TURNS = 4_096  # running at a time
_CHECK_BURST = 20.0


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """What may be ordered at most."""

    min_tokens: int = 2_048  # a pull worth less is not ordered
    orders_per_s: float = 2.0
    bytes_per_s: float = 256e6
    burst_bytes: float = 1e9
    max_in_flight: int = 2
    deadline_s: float = 5.0
    bytes_per_token: float = 0.0  # until pulls have shown it; 0: then nothing is ordered
    max_tracked_tokens: int = 4_000_000


class PrefetchAsk(NamedTuple):
    """Move what `source` holds of these tokens to `target`. Addresses are `ip:port` of the control
    channels."""

    order_id: str
    source: EndpointId
    target: EndpointId
    source_address: str
    target_address: str
    token_ids: Sequence[int]
    cache_salt: str | None
    lora_name: str | None
    gain_tokens: int
    size_bytes: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """Where a request would be computed if it came now, and what the source rule would say."""

    computing: Candidate
    choice: SourceChoice
    candidates: Sequence[Candidate] = field(repr=False)
    bytes_per_token: float | None = None  # as pulls have shown it

    def row(self, endpoint: EndpointId) -> Candidate | None:
        return next((row for row in self.candidates if row.endpoint.id == endpoint), None)


class _Budget:
    """So much a second, `burst` at once."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s, self._burst = rate_per_s, burst
        self._left, self._at_s = burst, 0.0

    def take(self, amount: float, now_s: float) -> bool:
        self._left = min(self._burst, self._left + max(0.0, now_s - self._at_s) * self._rate_per_s)
        self._at_s = max(self._at_s, now_s)
        if amount > self._left:
            return False
        self._left -= amount
        return True


class NextTurns:
    """Owned by the picker, on its thread."""

    def __init__(
        self, settings: PrefetchSettings, session: Callable[[Mapping[str, str]], str | None]
    ) -> None:
        """`session`: the session's name, out of a request's headers."""
        self._settings, self._session = settings, session
        self._turns: OrderedDict[str, tuple[bytes, SchedulingRequest]] = OrderedDict()  # by decision
        self._open: Counter[bytes] = Counter()
        self._tracked_tokens = 0
        self._checks = _Budget(10.0 * settings.orders_per_s, _CHECK_BURST)
        self._orders = _Budget(settings.orders_per_s, max(1.0, settings.orders_per_s))
        self._bytes = _Budget(settings.bytes_per_s, settings.burst_bytes)
        self._running: dict[str, tuple[EndpointId, float]] = {}  # source, when it is given up
        self._asks: deque[PrefetchAsk] = deque(maxlen=settings.max_in_flight)
        self.skipped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def settings(self) -> PrefetchSettings:
        return self._settings

    def placed(self, decision_id: str, request: SchedulingRequest) -> None:
        """A turn begins. Without a session's name, or without tokens, it is none."""
        name = self._session(request.headers)
        if name is None or request.token_ids is None or request.prompt_tokens < self._settings.min_tokens:
            return
        if self._tracked_tokens + request.prompt_tokens > self._settings.max_tracked_tokens:
            return
        if len(self._turns) >= MAX_TURNS:
            return
        session = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._turns[decision_id] = (session, request)
        self._open[session] += 1
        self._tracked_tokens += request.prompt_tokens

    def ended(
        self,
        decision_id: str,
        holder: EndpointId,
        outcome: Outcome,
        now_s: float,
        look_ahead: Callable[[SchedulingRequest], Ahead | None],
    ) -> None:
        """A turn is over, `holder` computed it. Orders a pull, or counts why not."""
        turn = self._turns.pop(decision_id, None)
        if turn is None:
            return
        session, request = turn
        self._tracked_tokens -= request.prompt_tokens
        self._open[session] -= 1
        still_open = self._open[session] > 0
        if not still_open:
            del self._open[session]
        if not outcome.completed or outcome.status != 200:
            self.skipped[FAILED] += 1
        elif still_open:
            self.skipped[OPEN] += 1
        elif not self._checks.take(1.0, now_s):
            self.skipped[RATE] += 1
        else:
            reason = self._consider(decision_id, holder, request, now_s, look_ahead(request))
            if reason is not None:
                self.skipped[reason] += 1

    def _consider(
        self,
        decision_id: str,
        holder: EndpointId,
        request: SchedulingRequest,
        now_s: float,
        ahead: Ahead | None,
    ) -> str | None:
        """None: ordered."""
        if ahead is None or ahead.computing.endpoint.id == holder:
            return STAYS
        target, source, here = ahead.computing, ahead.choice.source, ahead.row(holder)
        if here is None or not _busy(target) < _busy(here):
            return STAYS
        if source is None or source.gain_tokens < self._settings.min_tokens:
            return NO_SOURCE
        row = ahead.row(source.endpoint.id)
        self._expire(now_s)
        if row is None or self._is_busy_source(row):
            return SOURCE_BUSY
        if len(self._running) >= self._settings.max_in_flight:
            return IN_FLIGHT
        addresses = _p2p(row), _p2p(target)
        if not all(addresses):
            return NO_ADDRESS
        per_token = ahead.bytes_per_token or self._settings.bytes_per_token
        size = source.gain_tokens * per_token
        if not size or not self._bytes.take(size, now_s):
            return BYTES
        if not self._orders.take(1.0, now_s):
            return RATE
        self._running[decision_id] = (row.endpoint.id, now_s + self._settings.deadline_s + 1.0)
        self._asks.append(
            PrefetchAsk(
                decision_id,
                row.endpoint.id,
                target.endpoint.id,
                *addresses,
                (request.token_ids or ())[: source.servable_tokens],
                request.cache_salt,
                request.lora_name,
                source.gain_tokens,
                size,
            )
        )
        return None

    def _is_busy_source(self, row: Candidate) -> bool:
        """It waits, computes a prompt or serves a pull; unknown is busy."""
        ordered = any(source == row.endpoint.id for source, _ in self._running.values())
        load = row.load
        return ordered or row.metrics.waiting_requests != 0 or load.pulls_served + load.tokens > 0

    def take(self) -> list[PrefetchAsk]:
        """Orders since the last call. Each is to be ended by `finished`."""
        taken = list(self._asks)
        self._asks.clear()
        return taken

    def finished(self, order_id: str) -> None:
        """An order has ended, whatever it brought. Idempotent."""
        self._running.pop(order_id, None)

    def _expire(self, now_s: float) -> None:
        for order_id in [o for o, (_, until_s) in self._running.items() if until_s <= now_s]:
            del self._running[order_id]


def _busy(row: Candidate) -> float:
    """Requests there: our own and what the engine says, whichever is more."""
    told = (row.metrics.waiting_requests or 0.0) + (row.metrics.running_requests or 0.0)
    return max(told, float(row.load.requests))


def _p2p(row: Candidate) -> str:
    info = row.metrics.info
    return (info.p2p_addr if info else "") or row.endpoint.p2p_address
