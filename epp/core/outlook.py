"""What one request would meet on each endpoint, before one is chosen: for policies that look ahead.

Of a row: who would be named as its source, asked of the source rule itself, so that what is foreseen is what
is then decided; and, where costs are known, the time to its first token. Made anew for every decision; it
remembers what it was asked, so that the record can show it. It places nothing and learns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_plugin.identity import EndpointId
from epp.core.forecast import Forecast
from epp.core.source_selector import SourceSelector
from epp.core.thresholds import ROLE_LABEL
from epp.core.types import Candidate, SchedulingRequest, SourceChoice

MAX_HOLDERS = 4  # sources that are thought of, deepest first
MAX_PRICED = 24  # rows of a large pool whose pulls are priced, in either of two orders


class Outlook:
    """Of one request, over one state of the pool."""

    __slots__ = ("_candidates", "_found", "_holders", "_now_s", "_request", "_sources")

    def __init__(
        self,
        request: SchedulingRequest,
        candidates: Sequence[Candidate],
        sources: SourceSelector,
        now_s: float,
    ) -> None:
        self._request, self._candidates = request, candidates
        self._sources, self._now_s = sources, now_s
        self._holders: tuple[Candidate, ...] | None = None
        self._found: dict[EndpointId, Forecast] = {}

    @property
    def found(self) -> dict[EndpointId, Forecast]:
        """Every forecast that was asked for."""
        return self._found

    def source_for(self, row: Candidate) -> EndpointId | None:
        """Who would be named if `row` computed the request: of those that the rule allows the one with the
        most to give, the less busy one of two equals. None: nobody would."""
        best = max(self._choices(row), key=_worth, default=None)
        return best.source.endpoint.id if best is not None and best.source else None

    def forecasts(self, rows: Sequence[Candidate]) -> list[Forecast | None]:
        """Of each row; None: its costs are not known. In a large pool only rows that may win have their
        pulls priced: the least busy ones, and those that would be first by computing alone."""
        alone = [self._alone(row) for row in rows]
        known = [i for i, forecast in enumerate(alone) if forecast is not None]
        promising = set(sorted(known, key=lambda i: alone[i].busy_ms)[:MAX_PRICED])  # type: ignore[union-attr]
        promising |= set(sorted(known, key=lambda i: alone[i].total_ms)[:MAX_PRICED])  # type: ignore[union-attr]
        for i in promising:
            alone[i] = self._with_pull(rows[i], alone[i])  # type: ignore[arg-type]
        for row, forecast in zip(rows, alone, strict=True):
            if forecast is not None:
                self._found[row.endpoint.id] = forecast
        return alone

    def forecast(self, row: Candidate) -> Forecast | None:
        """As `forecasts`, of one row; asked once a decision."""
        if row.endpoint.id not in self._found:
            self.forecasts((row,))
        return self._found.get(row.endpoint.id)

    def _alone(self, row: Candidate) -> Forecast | None:
        """Computing everything that is not here."""
        prompt = self._request.prompt_tokens
        if self._request.token_ids is None or not row.match.state.has_claim:
            return None
        policy = self._sources.policy(self._request.model, row.endpoint.labels.get(ROLE_LABEL))
        held = min(row.match.expected_tokens, prompt)
        costs, now_s = self._sources.costs, self._now_s
        own = costs.compute(row, prompt - held, held, policy, now_s)
        ahead = costs.compute(row, row.load.uncached_prompt_tokens, 0, policy, now_s)
        if own is None or ahead is None:
            return None
        strangers = max(0.0, (row.metrics.waiting_requests or 0.0) - row.load.requests)
        queue_ms = ahead.tokens_ms + strangers * own.tokens_ms
        running = row.metrics.running_requests
        others = row.load.requests if running is None else max(running, row.load.requests)
        return Forecast(queue_ms, own.floor_ms, own.tokens_ms, others)

    def _with_pull(self, row: Candidate, alone: Forecast) -> Forecast:
        """With the pull that would be named; the cheapest of several. One that nobody can price is none."""
        policy = self._sources.policy(self._request.model, row.endpoint.labels.get(ROLE_LABEL))
        held = row.match.expected_tokens
        best: Forecast | None = None
        for choice in self._choices(row):
            source, price = choice.source, choice.predicted
            if source is None or price is None:
                continue
            there = held + source.gain_tokens
            rest = self._sources.costs.compute(
                row, max(0, self._request.prompt_tokens - there), there, policy, self._now_s
            )
            if rest is None:
                continue
            pull_ms = max(0.0, price.pull_ms - price.hidden_ms)
            found = Forecast(
                alone.queue_ms, rest.floor_ms, rest.tokens_ms, alone.running, pull_ms, source.endpoint.id
            )
            if best is None or found.total_ms < best.total_ms:
                best = found
        return best or alone

    def _choices(self, row: Candidate) -> list[SourceChoice]:
        """What the rule says of each of the deepest holders alone, where it names it."""
        if not row.match.state.has_claim:
            return []
        held, now_s = row.match.expected_tokens, self._now_s
        refused = self._sources.refused_by(row, now_s)
        found = []
        for holder in self._deepest():
            if holder.endpoint.id != row.endpoint.id and holder.match.servable_tokens > held:
                choice = self._sources.choose(self._request, (holder,), row, refused, now_s)
                if choice.source is not None:
                    found.append(choice)
        return found

    def _deepest(self) -> tuple[Candidate, ...]:
        if self._holders is None:
            holders = [c for c in self._candidates if c.match.cpu_blocks and not c.endpoint.draining]
            holders.sort(key=_depth_then_idle, reverse=True)
            self._holders = tuple(holders[:MAX_HOLDERS])
        return self._holders


def _depth_then_idle(row: Candidate) -> tuple[int, float]:
    return row.match.servable_tokens, -((row.metrics.waiting_requests or 0.0) + row.load.pulls_served)


def _worth(choice: SourceChoice) -> tuple[int, float]:
    """Tokens it brings, then how little else its source has to do (the weight it would be sampled by)."""
    gain_tokens = choice.source.gain_tokens if choice.source else 0
    return gain_tokens, choice.considered[0][2] if choice.considered else 0.0
