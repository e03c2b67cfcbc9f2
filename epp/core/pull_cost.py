"""Cost mode: what a pull and what recomputing would take, learned online. Pure and bounded.

A pull's time is a line over the bytes of whole blocks, per (source, destination); where a pair has not been
seen of late its path class (`kvpull/source-class`) speaks for it, and before that the calibrated curve. The
first pull between two engines pays for the session. Pulls that the source serves already share its link.
Recomputing is a line over tokens weighted by the calibrated curvature, per endpoint, learned where nothing
else ran. It does not decide: `choose_source` does, and asks the threshold while this is unsure.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from engine_plugin.identity import EndpointId
from epp.core.decision_record import DecisionRecord
from epp.core.learned_line import Estimate, LearnedLine, Line
from epp.core.pull_curves import PullCurve, PullPrediction, RecomputeCurve
from epp.core.thresholds import SOURCE_CLASS_LABEL, SourcePolicy
from epp.core.types import PULL_MISSED, Candidate, PullReport

MAX_PAIRS = 4_096
MAX_ENDPOINTS = 1_024
MAX_CLASSES = 64
_MIN_LEARNED_TOKENS = 64  # less than that computed says nothing of the slope
_COLD_SAMPLES = 8
_CLEAR = 2.0  # standard errors between two costs from where on the cheaper one is known

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Bounded(Generic[K, V]):
    """The `limit` keys used last."""

    __slots__ = ("_limit", "_make", "_values")

    def __init__(self, limit: int, make: Callable[[], V]) -> None:
        self._limit, self._make = limit, make
        self._values: OrderedDict[K, V] = OrderedDict()

    def peek(self, key: K) -> V | None:
        return self._values.get(key)

    def use(self, key: K) -> V:
        """The value of `key`, made if need be."""
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = self._make()
            if len(self._values) > self._limit:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(key)
        return value

    def set(self, key: K, value: V) -> None:
        self.use(key)
        self._values[key] = value

    def __len__(self) -> int:
        return len(self._values)


Pair = tuple[EndpointId, EndpointId]  # source, destination


class ComputeCost(NamedTuple):
    """What a request takes on an idle engine: the part that each pays, and the part of its tokens."""

    floor_ms: float
    tokens_ms: float


@dataclass(frozen=True, slots=True)
class _Session:
    """Two engines that have pulled. `first`: size and ms of the first pull, until a second one has come."""

    instances: tuple[str, ...] = ()
    first: tuple[float, float] | None = None


class PullCosts:
    """Everything learned; owned by the picker, on its thread."""

    def __init__(self) -> None:
        self._pairs: _Bounded[Pair, LearnedLine] = _Bounded(MAX_PAIRS, LearnedLine)
        self._classes: _Bounded[str, LearnedLine] = _Bounded(MAX_CLASSES, LearnedLine)
        self._cold: _Bounded[str, deque[float]] = _Bounded(MAX_CLASSES, lambda: deque(maxlen=_COLD_SAMPLES))
        self._sessions: _Bounded[Pair, _Session] = _Bounded(MAX_PAIRS, _Session)
        self._computing: _Bounded[EndpointId, LearnedLine] = _Bounded(MAX_ENDPOINTS, _computing_line)
        self._curvature: _Bounded[EndpointId, float] = _Bounded(MAX_ENDPOINTS, float)
        self._token_bytes: _Bounded[EndpointId, float] = _Bounded(MAX_ENDPOINTS, float)

    def __len__(self) -> int:
        return len(self._pairs)

    # --- predicting -----------------------------------------------------------------------------
    def predict(
        self, source: Candidate, computing: Candidate, gain_tokens: int, terms: SourcePolicy, now_s: float
    ) -> PullPrediction | None:
        """Cost of pulling `gain_tokens` and of computing them; None: nothing is known of one of them."""
        pair = (source.endpoint.id, computing.endpoint.id)
        token_bytes = self._bytes_per_token(computing.endpoint.id, terms.pull_seed)
        size = gain_tokens * token_bytes
        prior = self._pull_prior(_path_class(source), size, token_bytes, terms, now_s)
        learned = self._pairs.peek(pair) or LearnedLine()
        pull = learned.estimate(size, prior, now_s)
        held = computing.match.expected_tokens
        computed = self._estimate_computing(
            computing.endpoint.id, gain_tokens, held, terms.recompute_seed, now_s
        )
        if pull is None or computed is None:
            return None
        estimate, weighted_tokens = computed
        cold_ms = self._cold_ms(pair, source, computing, terms.pull_seed)
        sharing = 1 + source.load.pulls_served
        pull_ms = pull.line.floor_ms + pull.line.slope * size * sharing + cold_ms
        recompute_ms = estimate.line.slope * weighted_tokens
        hidden_ms = _hidden_ms(computing, estimate.line)
        paid_ms = max(0.0, pull_ms - hidden_ms) + terms.cost_margin_ms
        return PullPrediction(
            gain_tokens=gain_tokens,
            pull_ms=pull_ms,
            recompute_ms=recompute_ms,
            margin_ms=terms.cost_margin_ms,
            hidden_ms=hidden_ms,
            cold_ms=cold_ms,
            sure=_is_sure(pull, estimate, paid_ms, recompute_ms),
        )

    def compute(
        self, row: Candidate, tokens: int, held_tokens: int, terms: SourcePolicy, now_s: float
    ) -> ComputeCost | None:
        """Of computing `tokens` of a prompt after `held_tokens` that are there. None: nothing is known."""
        found = self._estimate_computing(row.endpoint.id, tokens, held_tokens, terms.recompute_seed, now_s)
        if found is None:
            return None
        estimate, weighted_tokens = found
        return ComputeCost(estimate.line.floor_ms, estimate.line.slope * weighted_tokens)

    def token_bytes(self, endpoint: EndpointId) -> float | None:
        """KV bytes of a token, as pulls to it have shown; None: none has."""
        return self._token_bytes.peek(endpoint)

    def _bytes_per_token(self, endpoint: EndpointId, seed: PullCurve | None) -> float:
        """1 until known: then sizes are tokens, and so is the seed's slope."""
        return self._token_bytes.peek(endpoint) or (seed.bytes_per_token if seed else 0.0) or 1.0

    def _pull_prior(
        self, path_class: str, size: float, token_bytes: float, terms: SourcePolicy, now_s: float
    ) -> Line | None:
        """Of a pair that has not been seen: its class where that agrees with itself, else the seed."""
        seed = None
        if terms.pull_seed is not None:
            fixed_ms = terms.recompute_seed.fixed_ms if terms.recompute_seed else 0.0
            # a calibrated time runs to the first token: its floor contains the step that both choices pay
            seed = Line(
                max(0.0, terms.pull_seed.floor_ms - fixed_ms), terms.pull_seed.token_us * 1e-3 / token_bytes
            )
        line = self._classes.peek(path_class)
        estimate = line.estimate(size, None, now_s) if line is not None else None
        return estimate.line if estimate is not None and estimate.sure else seed

    def _estimate_computing(
        self,
        endpoint: EndpointId,
        tokens: int,
        held_tokens: int,
        seed: RecomputeCurve | None,
        now_s: float,
    ) -> tuple[Estimate, float] | None:
        curvature = _curvature(seed)
        learned = self._computing.peek(endpoint)
        if learned is None or self._curvature.peek(endpoint) != curvature:
            learned = _computing_line()
        weighted = _weighted_tokens(tokens, held_tokens, curvature)
        prior = None if seed is None else Line(seed.fixed_ms, seed.token_us * 1e-3)
        estimate = learned.estimate(weighted, prior, now_s)
        return None if estimate is None else (estimate, weighted)

    def _cold_ms(self, pair: Pair, source: Candidate, computing: Candidate, seed: PullCurve | None) -> float:
        session = self._sessions.peek(pair)
        if session is not None and session.instances == _instances(source, computing):
            return 0.0
        seen = self._cold.peek(_path_class(source))
        return statistics.median(seen) if seen else (seed.cold_ms if seed else 0.0)

    # --- learning -------------------------------------------------------------------------------
    def learn(self, record: DecisionRecord, terms: SourcePolicy, now_s: float) -> None:
        """From a request that has ended, with its pull reported where there was one. `terms` as they applied
        to its source (or to all)."""
        computing = record.decision.computed_by
        if computing is None or record.outcome is None:
            return
        if record.decision.choice.source is None:
            self._learn_computing(record, computing, terms.recompute_seed, now_s)
        elif record.report is not None:
            self._learn_pull(record, computing, record.report, terms, now_s)

    def _learn_computing(
        self, record: DecisionRecord, computing: Candidate, seed: RecomputeCurve | None, now_s: float
    ) -> None:
        timed = _undisturbed(record, computing)
        if timed is None:
            return
        ttft_ms, cached, computed = timed
        if computed < _MIN_LEARNED_TOKENS:
            return
        endpoint, curvature = computing.endpoint.id, _curvature(seed)
        if self._curvature.peek(endpoint) != curvature:
            self._curvature.set(endpoint, curvature)
            self._computing.set(endpoint, _computing_line())
        self._computing.use(endpoint).add(_weighted_tokens(computed, cached, curvature), ttft_ms, now_s)

    def _learn_pull(
        self,
        record: DecisionRecord,
        computing: Candidate,
        report: PullReport,
        terms: SourcePolicy,
        now_s: float,
    ) -> None:
        """A pull that ran out of time counts with what was asked of it: it would have taken longer still."""
        source_id = record.decision.choice.source.endpoint.id if record.decision.choice.source else None
        source = next((h for h in record.decision.choice.holders if h.endpoint.id == source_id), None)
        if source is None or report.reason == PULL_MISSED or not report.asked_tokens:
            return
        endpoint, pair = computing.endpoint.id, (source.endpoint.id, computing.endpoint.id)
        if report.received_tokens:
            self._token_bytes.set(endpoint, report.received_bytes / report.received_tokens)
        elif report.duration_ms <= 0.0 or report.reason == "ok":
            return
        token_bytes = self._bytes_per_token(endpoint, terms.pull_seed)
        size = (report.received_tokens or report.asked_tokens) * token_bytes
        ms = report.duration_ms / (1 + source.load.pulls_served)  # the first token also waits for others
        self._keep(source, pair, size, ms, _instances(source, computing), now_s)

    def _keep(
        self,
        source: Candidate,
        pair: Pair,
        size: float,
        ms: float,
        instances: tuple[str, ...],
        now_s: float,
    ) -> None:
        """The first pull of a session tells its cold cost only once a second one says what is warm: on a slow
        link the first is slow as well."""
        session = self._sessions.peek(pair)
        if session is None or session.instances != instances:
            self._sessions.set(pair, _Session(instances, (size, ms)))
            self._pairs.set(pair, LearnedLine())
            return
        path_class = _path_class(source)
        if session.first is not None:
            first_size, first_ms = session.first
            self._cold.use(path_class).append(max(0.0, first_ms - ms * max(1.0, first_size / size)))
            self._sessions.set(pair, _Session(instances))
        self._pairs.use(pair).add(size, ms, now_s)
        self._classes.use(path_class).add(size, ms, now_s)


def _is_sure(pull: Estimate, computing: Estimate, pull_ms: float, recompute_ms: float) -> bool:
    """Both costs are known well, or they lie further apart than they are uncertain."""
    if pull.sure and computing.sure:
        return True
    apart = abs(math.log(max(pull_ms, 1e-3) / max(recompute_ms, 1e-3)))
    return pull.in_reach and computing.in_reach and apart > _CLEAR * math.hypot(pull.error, computing.error)


def _computing_line() -> LearnedLine:
    return LearnedLine(keeps_slope=True)


def _undisturbed(record: DecisionRecord, computing: Candidate) -> tuple[float, int, int] | None:
    """(ms to the first token, cached tokens, computed tokens) of a request that began on an idle engine."""
    outcome, decision = record.outcome, record.decision
    if outcome is None or not outcome.completed or outcome.ttft_s is None or outcome.cached_tokens is None:
        return None
    if decision.prompt_tokens is None or decision.destination.id != decision.computing:
        return None
    if outcome.prompt_tokens is not None and outcome.prompt_tokens > decision.prompt_tokens:
        return None  # several prompts, or one of which only the text in front of a picture is known
    if computing.load.requests or computing.metrics.waiting_requests or computing.metrics.running_requests:
        return None
    cached = min(outcome.cached_tokens, decision.prompt_tokens)
    return outcome.ttft_s * 1e3, cached, decision.prompt_tokens - cached


def _hidden_ms(computing: Candidate, line: Line) -> float:
    """A pull runs while the engine computes for others, unless it queues before it is admitted. What is
    booked is under way: half of it is left, on average."""
    if computing.metrics.waiting_requests:
        return 0.0
    return computing.load.uncached_prompt_tokens * line.slope / 2.0


def _curvature(seed: RecomputeCurve | None) -> float:
    """Per token: how much dearer a token gets with each one before it, in half tokens."""
    if seed is None or seed.token_us <= 0.0:
        return 0.0
    return seed.token_pair_ns * 1e-3 / seed.token_us


def _weighted_tokens(tokens: int, held_tokens: int, curvature: float) -> float:
    """`tokens` computed after `held_tokens`, in tokens at the start of a prompt."""
    end = tokens + held_tokens
    return tokens + curvature * (end * end - held_tokens * held_tokens)


def _path_class(source: Candidate) -> str:
    return source.endpoint.labels.get(SOURCE_CLASS_LABEL, "")


def _instances(source: Candidate, computing: Candidate) -> tuple[str, ...]:
    """A restarted engine is another one: its sessions are gone."""
    infos = (source.metrics.info, computing.metrics.info)
    return tuple(info.instance if info else "?" for info in infos)
