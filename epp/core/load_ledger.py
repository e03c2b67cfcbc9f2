"""Load that this picker itself has put on endpoints, held as leases.

An endpoint's load is *derived* from the leases that name it, so it can neither go negative nor
outlive its requests, whatever pods do in the meantime: a release always returns what was charged,
to whom it was charged (cases S-D07, S-D14). Only the end of a stream ends a lease. The pull in it
ends earlier, at the first of: the engine's report, the first token, the end of the stream, or its own
expiry, which the caller brings about by saying what time it is.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from engine_plugin.identity import EndpointId
from epp.core.types import NO_LOAD, Candidate, InflightLoad, PrefixMatch, SchedulingRequest


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """How a request's work is counted (`inflight-load-producer`): the part of its prompt that is not
    expected in the computing endpoint's cache, and, if wanted, its output by a ratio."""

    prefix: Callable[[Candidate], PrefixMatch]
    output_ratio: float = 0.0  # output tokens for a token of the prompt; 0: output is not counted
    max_output_tokens: int | None = None

    def prompt_tokens(self, request: SchedulingRequest, computing: Candidate, pulled_tokens: int) -> int:
        """Uncached tokens of the prompt."""
        cached = self.prefix(computing).expected_tokens
        return max(0, request.load_tokens - cached - pulled_tokens)

    def output_tokens(self, request: SchedulingRequest) -> int:
        tokens = int(request.load_tokens * self.output_ratio)
        return tokens if self.max_output_tokens is None else min(tokens, self.max_output_tokens)


BY_ENGINE_REPORTS = LoadEstimate(attrgetter("match"))


@dataclass(slots=True)
class _Lease:
    serving: EndpointId
    computing: EndpointId
    source: EndpointId | None
    uncached_prompt_tokens: int
    output_tokens: int
    prefill_pending: bool = True
    pull_pending: bool = False


class LoadLedger:
    """In-flight requests, uncached prompt tokens and outstanding pulls, per endpoint."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._requests: Counter[EndpointId] = Counter()
        self._tokens: Counter[EndpointId] = Counter()
        self._pulls: Counter[EndpointId] = Counter()
        self._output: Counter[EndpointId] = Counter()
        self._loads: dict[EndpointId, InflightLoad] = {}  # of those that have any, but for `_changed`
        self._changed: set[EndpointId] = set()
        self._expiries: list[tuple[float, str]] = []  # heap; entries of ended pulls go when they are due

    def __len__(self) -> int:
        return len(self._leases)

    def load(self, endpoint: EndpointId) -> InflightLoad:
        self._renew()
        return self._loads.get(endpoint, NO_LOAD)

    def loads(self, endpoints: Sequence[EndpointId]) -> list[InflightLoad]:
        """`load` of each. What has not changed since it was last asked for is not made again."""
        self._renew()
        known = self._loads
        return [known.get(endpoint, NO_LOAD) for endpoint in endpoints]

    def _renew(self) -> None:
        for endpoint in self._changed:
            figures = (self._requests[endpoint], self._tokens[endpoint], self._pulls[endpoint])
            load = InflightLoad(*figures, output_tokens=self._output[endpoint])
            if load == NO_LOAD:
                self._loads.pop(endpoint, None)
            else:
                self._loads[endpoint] = load
        self._changed.clear()

    def _add(self, counter: Counter[EndpointId], endpoint: EndpointId, amount: int) -> None:
        """`amount` may be negative; a counter has no zeros."""
        self._changed.add(endpoint)
        counter[endpoint] += amount
        if counter[endpoint] == 0:
            del counter[endpoint]

    def book(
        self,
        lease_id: str,
        *,
        serving: EndpointId,
        computing: EndpointId,
        source: EndpointId | None,
        uncached_prompt_tokens: int,
        output_tokens: int = 0,
        pull_expires_at_s: float = math.inf,
    ) -> None:
        """Charge a decision. Under P/D the prefill endpoint counts as busy until the first token; output
        is the serving endpoint's until the end.
        A pull that nobody reports the end of is counted until `pull_expires_at_s`.

        Raises:
            ValueError: `lease_id` is already booked.
        """
        if lease_id in self._leases:
            raise ValueError(f"decision {lease_id} is already booked")
        lease = _Lease(serving, computing, source, uncached_prompt_tokens, output_tokens)
        self._leases[lease_id] = lease
        self._add(self._requests, serving, 1)
        if computing != serving:
            self._add(self._requests, computing, 1)
        self._add(self._tokens, computing, uncached_prompt_tokens)
        self._add(self._output, serving, output_tokens)
        if source is not None:
            lease.pull_pending = True
            self._add(self._pulls, source, 1)
            if pull_expires_at_s != math.inf:
                heapq.heappush(self._expiries, (pull_expires_at_s, lease_id))

    def pull_finished(self, lease_id: str) -> bool:
        """The pull has ended, whatever it brought. Idempotent: False if none was outstanding."""
        lease = self._leases.get(lease_id)
        return lease is not None and self._end_pull(lease)

    def expire_pulls(self, now_s: float) -> int:
        """End the pulls whose time is over; how many there were."""
        expired = 0
        while self._expiries and self._expiries[0][0] <= now_s:
            expired += self.pull_finished(heapq.heappop(self._expiries)[1])
        return expired

    def first_token(self, lease_id: str) -> None:
        """The prompt is computed and any pull has ended. Idempotent; unknown ids are ignored."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._end_prefill(lease)
            self._end_pull(lease)

    def release(self, lease_id: str) -> bool:
        """End a lease. Idempotent: False if it was not held."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        self._end_prefill(lease)
        self._end_pull(lease)
        self._add(self._requests, lease.serving, -1)
        self._add(self._output, lease.serving, -lease.output_tokens)
        return True

    def _end_prefill(self, lease: _Lease) -> None:
        if not lease.prefill_pending:
            return
        lease.prefill_pending = False
        self._add(self._tokens, lease.computing, -lease.uncached_prompt_tokens)
        if lease.computing != lease.serving:
            self._add(self._requests, lease.computing, -1)

    def _end_pull(self, lease: _Lease) -> bool:
        if not lease.pull_pending or lease.source is None:
            return False
        lease.pull_pending = False
        self._add(self._pulls, lease.source, -1)
        return True

    def check_integrity(self) -> None:
        """Recount everything from the leases. Raises AssertionError on a difference."""
        fresh = LoadLedger()
        for lease_id, lease in self._leases.items():
            fresh.book(
                lease_id,
                serving=lease.serving,
                computing=lease.computing,
                source=lease.source,
                uncached_prompt_tokens=lease.uncached_prompt_tokens,
                output_tokens=lease.output_tokens,
            )
            if not lease.prefill_pending:
                fresh.first_token(lease_id)
            if not lease.pull_pending:
                fresh.pull_finished(lease_id)
        for mine, recount in (
            (self._requests, fresh._requests),
            (self._tokens, fresh._tokens),
            (self._pulls, fresh._pulls),
            (self._output, fresh._output),
        ):
            if +mine != +recount:
                raise AssertionError(f"ledger says {mine}, its leases say {recount}")
            if any(count < 0 for count in mine.values()):
                raise AssertionError(f"negative count in {mine}")
        for endpoint in {*self._loads, *self._requests, *self._pulls}:
            if self.load(endpoint) != fresh.load(endpoint):
                raise AssertionError(f"load of {endpoint} is {self.load(endpoint)}")
