"""What a picker is made of, besides state: values and plugins. How they are configured is not known here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from epp.core.approx_prefix import ApproxSettings
from epp.core.disagg import ProfileHandler
from epp.core.load_ledger import BY_ENGINE_REPORTS, LoadEstimate
from epp.core.next_turn import NextTurns
from epp.core.plugin import Follower, SourceChooser
from epp.core.source_selector import SourceProducer


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """Everything a picker is made of, besides state."""

    handler: ProfileHandler
    source_producer: SourceProducer | None = None
    metrics_staleness_s: float = 2.0
    ledger_capacity: int = 4096
    pull_deadline_s: float = 10.0  # longest that an engine lets a pull take
    base_models: tuple[str, ...] = ()  # names of the base model besides those that engines report
    approx: ApproxSettings | None = None  # None: nothing is concluded from placements
    estimate: LoadEstimate = BY_ENGINE_REPORTS
    followers: tuple[Follower, ...] = ()  # plugins that remember where requests went
    header_names: frozenset[str] = frozenset()  # request headers that plugins read
    identity_headers: tuple[
        str, ...
    ] = ()  # of an agent's session, the first one that is there; in lower case
    looks_ahead: bool = False  # some plugin reads an outlook
    source_choosers: tuple[SourceChooser, ...] = ()
    next_turns: NextTurns | None = None  # None: nothing is pulled before it is asked for

    @property
    def pull_lease_s(self) -> float:
        """How long a pull counts as outstanding, and may be reported, without a word of the engine."""
        return self.pull_deadline_s + 1.0

    def changed_to(self, new: PickerSettings) -> PickerSettings:
        """`new`, but for what is set once: times, capacities, names of the base model, and what is concluded
        from placements."""
        return replace(
            new,
            metrics_staleness_s=self.metrics_staleness_s,
            ledger_capacity=self.ledger_capacity,
            pull_deadline_s=self.pull_deadline_s,
            base_models=self.base_models,
            approx=self.approx,
        )
