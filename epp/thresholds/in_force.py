"""Which thresholds are in force: last good content, its generation, what was refused and why.

The part that every input shares. An input offers readings; a good one that differs is handed to the
picker as one immutable value with a new generation; a bad one changes nothing, and before there is a
good one pulls are off. Runs on the loop's thread; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from epp.core.errors import ConfigError
from epp.core.thresholds import NO_THRESHOLDS, PullSettings, PullThresholds, everywhere
from epp.thresholds.merge import Merged, Texts, merge_texts

log = logging.getLogger(__name__)

PULLS_OFF = everywhere(PullSettings(enabled=False))


@dataclass(frozen=True, slots=True)
class ThresholdState:
    """What is in force, where it came from, and whether the newest content was refused."""

    thresholds: PullThresholds = NO_THRESHOLDS
    rejected: str | None = None  # why the newest content is not in force
    warnings: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()  # names, in the order they were merged
    source: str = "none"  # the active input

    @property
    def generation(self) -> int:
        return self.thresholds.generation


@dataclass(frozen=True, slots=True)
class Reading:
    """One content of an input: what it says, or why it is refused."""

    texts: Texts
    merged: Merged = field(default_factory=lambda: Merged({}))
    refusal: str | None = None


def read_documents(texts: Texts) -> Reading:
    """Parse and merge; blocking for as long as the documents are long."""
    try:
        return Reading(texts, merge_texts(texts))
    except ConfigError as error:
        return Reading(texts, refusal=str(error))


class ThresholdsInForce:
    """Calls `on_change` with every new value."""

    def __init__(self, source: str, on_change: Callable[[PullThresholds], None]) -> None:
        self._source = source
        self._on_change = on_change
        self._accepted: Texts | None = None
        self.state = ThresholdState(source=source)

    def offer(self, reading: Reading) -> None:
        """Take a reading over if it is good and new."""
        if reading.refusal is not None:
            self.reject(reading.refusal)
        elif reading.texts == self._accepted:
            self._clear()
        else:
            thresholds = PullThresholds(reading.merged.rules, self.state.generation + 1)
            self._on_change(thresholds)
            self._accepted = reading.texts
            names = tuple(name for name, _ in reading.texts)
            self.state = ThresholdState(thresholds, None, reading.merged.warnings, names, self._source)
            self._log_change()

    def _log_change(self) -> None:
        state = self.state
        rules = "; ".join(f"{scope}: {settings}" for scope, settings in state.thresholds.rules.items())
        log.info("pull thresholds generation %d in force: %.2000s", state.generation, rules or "nothing set")
        for warning in state.warnings:
            log.warning("pull thresholds: %s", warning)

    def _clear(self) -> None:
        if self.state.rejected is not None:
            self.state = self._with(None)
            log.info("pull thresholds are those of generation %d again", self.state.generation)

    def _with(self, rejected: str | None) -> ThresholdState:
        state = self.state
        return ThresholdState(state.thresholds, rejected, state.warnings, state.documents, state.source)

    def reject(self, why: str, fault: Exception | None = None) -> None:
        """The input's newest content cannot be used, or it cannot be read at all."""
        if why == self.state.rejected:
            return
        kept = f"generation {self.state.generation} stays" if self._accepted is not None else "pulls are off"
        log.error("pull thresholds not accepted, %s: %s", kept, why, exc_info=fault)
        if self._accepted is not None:
            self.state = self._with(why)
            return
        first = self.state.thresholds != PULLS_OFF
        self.state = ThresholdState(PULLS_OFF, why, source=self._source)
        if first:
            try:
                self._on_change(PULLS_OFF)
            except Exception:  # task guard: a document must not end the picker
                log.exception("pulls could not be switched off")
