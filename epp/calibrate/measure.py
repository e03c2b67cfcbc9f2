"""The protocol: which legs run in which order, and what each must have moved to count.

Every leg has a fresh random prefix under a fresh salt, so nothing is ever held by accident. Lengths are
shuffled in every repetition and the two legs take turns in going first: a drift of the machine hits both.
The control leg seeds the source and then names none: it must move nothing.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epp.calibrate.fit import MIN_SAMPLES, PULL, RECOMPUTE, uncertainty
from epp.calibrate.probe import Counters, Engine, ProbeError, SourceName, Timed

CONTROL = "control"
_COUNTERS_AGREE_S = 5.0  # both ends count a pull within this


@dataclass(frozen=True, slots=True)
class Settings:
    lengths: tuple[int, ...]
    repetitions: int
    token_ids: tuple[int, int]
    settle_s: float = 0.0  # between seeding and pulling: stock engines offload a moment later
    accept_unverified: bool = False  # engines without our counters
    seed: int | None = None
    max_repetitions: int = 0  # of lengths whose medians are not known well enough; 0: no more than the plan
    max_noise: float = 0.15  # what is well enough (`fit.uncertainty`)


@dataclass(frozen=True, slots=True)
class Leg:
    """One measurement to make."""

    kind: str
    tokens: int


@dataclass(slots=True)
class Measured:
    """Samples by kind and length, and what did not count."""

    samples: dict[str, dict[int, list[float]]] = field(default_factory=lambda: {RECOMPUTE: {}, PULL: {}})
    discarded: list[str] = field(default_factory=list)
    bytes_per_token: float | None = None
    moved_bytes: int = 0
    control_legs: int = 0
    verified: bool = True


def plan(settings: Settings, rng: random.Random) -> list[Leg]:
    """Warm-up is not in it. Every length once a repetition, both kinds, and a control once a length."""
    legs: list[Leg] = []
    for repetition in range(settings.repetitions):
        lengths = list(settings.lengths)
        rng.shuffle(lengths)
        for place, tokens in enumerate(lengths):
            pair = [Leg(RECOMPUTE, tokens), Leg(PULL, tokens)]
            legs += pair if (place + repetition) % 2 else pair[::-1]
            if repetition == 0:
                legs.append(Leg(CONTROL, tokens))
    return legs


class CountersDisagree(ProbeError):
    """The source has served other bytes than the destination received."""


class Pair:
    """A source and a destination that nobody else uses."""

    def __init__(
        self,
        source: Engine,
        destination: Engine,
        source_name: SourceName,
        settings: Settings,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._source, self._destination, self._name = source, destination, source_name
        self._settings = settings
        self._progress = progress
        self._rng = random.Random(settings.seed)

    def run(self) -> Measured:
        """Warm up, then measure everything.

        Raises:
            ProbeError: an engine fails, or bytes moved where none may (or none where they must).
        """
        measured = Measured()
        self._progress("warming up the pair")
        for tokens in (min(self._settings.lengths), max(self._settings.lengths)):
            for kind in (PULL, RECOMPUTE):
                self._leg(Leg(kind, tokens), Measured())
        legs = plan(self._settings, self._rng)
        for number, leg in enumerate(legs, 1):
            self._progress(f"{number} of {len(legs)}: {leg.kind} {leg.tokens} tokens")
            self._leg(leg, measured)
        self._repeat_noisy(measured)
        return measured

    def _repeat_noisy(self, measured: Measured) -> None:
        """Disturbances pass: lengths that are not known well enough get further rounds, both legs, so that a
        drift still hits both."""
        settings = self._settings
        for repetition in range(settings.repetitions, settings.max_repetitions):
            noisy = [tokens for tokens in settings.lengths if _is_noisy(measured, tokens, settings.max_noise)]
            if not noisy:
                return
            names = ", ".join(map(str, noisy))
            self._progress(f"repetition {repetition + 1}: noisy so far: {names} tokens")
            self._rng.shuffle(noisy)
            for place, tokens in enumerate(noisy):
                pair = [Leg(RECOMPUTE, tokens), Leg(PULL, tokens)]
                for leg in pair if (place + repetition) % 2 else pair[::-1]:
                    self._leg(leg, measured)

    def _leg(self, leg: Leg, measured: Measured) -> None:
        low, high = self._settings.token_ids
        # one token more than the prefix, so that all of the prefix can be reused
        prompt = [self._rng.randint(low, high) for _ in range(leg.tokens + 1)]
        salt = secrets.token_hex(16)
        if leg.kind != RECOMPUTE:
            self._source.complete(prompt, salt)
            time.sleep(self._settings.settle_s)
        before = self._source.counters(), self._destination.counters()
        timed = self._destination.complete(prompt, salt, self._name if leg.kind == PULL else None)
        try:
            moved = self._moved_bytes(*before)
        except CountersDisagree:
            failures = self._failures(before[1]) if leg.kind == PULL else ""
            if not failures:
                raise
            measured.discarded.append(
                f"pull at {leg.tokens:,} tokens: the destination gave it up ({failures})"
            )
            return
        if leg.kind == PULL:
            self._keep_pull(leg, timed, moved, before[1], measured)
        else:
            self._keep_recompute(leg, timed, moved, measured)

    def _failures(self, before: Counters) -> str:
        """Why the destination's pulls have failed since; of such a pull the source may have served all."""
        now = self._destination.counters().failed_pulls
        return ", ".join(
            sorted(reason for reason, count in now.items() if count > before.failed_pulls.get(reason, 0.0))
        )

    def _moved_bytes(self, source: Counters, destination: Counters) -> int | None:
        """By both ends' counters, which must agree; None: they do not count."""
        if source.served_bytes is None or destination.received_bytes is None:
            if not self._settings.accept_unverified:
                raise ProbeError(
                    "the engines report no kvpull_ counters, so bytes cannot be verified; --accept-unverified"
                    " goes by the tokens that they count as cached"
                )
            return None
        give_up_s = time.monotonic() + _COUNTERS_AGREE_S
        while True:
            served = (self._source.counters().served_bytes or 0.0) - source.served_bytes
            received = (self._destination.counters().received_bytes or 0.0) - destination.received_bytes
            if served == received:
                return int(served)
            if time.monotonic() > give_up_s:
                raise CountersDisagree(
                    f"the source counts {served:.0f} bytes served and the destination {received:.0f}"
                    " received: other traffic runs on the pair"
                )
            time.sleep(0.02)

    def _keep_recompute(self, leg: Leg, timed: Timed, moved: int | None, measured: Measured) -> None:
        if moved or timed.cached_tokens:
            raise ProbeError(
                f"{leg.kind} at {leg.tokens} tokens: {moved or 0} bytes moved and {timed.cached_tokens or 0}"
                " tokens were cached although no source was named; nothing can be measured on this pair"
            )
        measured.control_legs += leg.kind == CONTROL
        measured.samples[RECOMPUTE].setdefault(leg.tokens, []).append(timed.ms)

    def _keep_pull(
        self, leg: Leg, timed: Timed, moved: int | None, before: Counters, measured: Measured
    ) -> None:
        kept = measured.samples[PULL].setdefault(leg.tokens, [])
        cached = timed.cached_tokens
        if moved is None:
            measured.verified = False
            after = self._destination.counters()
            if cached is None and after.external_tokens is not None and before.external_tokens is not None:
                cached = int(after.external_tokens - before.external_tokens)
        if moved == 0 or cached is None or cached < leg.tokens:
            measured.discarded.append(
                f"pull at {leg.tokens:,} tokens: {moved or 0} bytes moved, {cached or 0} tokens were cached"
            )
            return
        if moved is not None:
            measured.moved_bytes += moved
            per_token = moved / leg.tokens
            if measured.bytes_per_token is not None and per_token > 1.5 * measured.bytes_per_token:
                raise ProbeError(
                    f"pull at {leg.tokens} tokens: {moved} bytes are too many: other traffic runs"
                )
            measured.bytes_per_token = per_token
        kept.append(timed.ms)


def _is_noisy(measured: Measured, tokens: int, max_noise: float) -> bool:
    legs = [samples.get(tokens, []) for samples in measured.samples.values()]
    return any(len(values) < MIN_SAMPLES or uncertainty(values) > max_noise for values in legs)


def check_lengths(lengths: Sequence[int], block_size_tokens: int) -> None:
    """Raises ProbeError: a length that is not whole blocks is never pulled whole."""
    odd = [n for n in lengths if n % block_size_tokens]
    if odd:
        raise ProbeError(f"lengths must be multiples of the block size ({block_size_tokens}): {odd}")
