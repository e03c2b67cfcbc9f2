"""On which terms a request is served: its priority, its flow, and the model it is really for.

Joins what the request says (`Wishes`) with what the cluster says (InferenceObjectives and
InferenceModelRewrites).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from epp.core.model_rewrite import ModelRewrites
from epp.extproc import wire
from epp.extproc.wishes import Wishes
from epp.flow.admission import Asking

BY_HEADER: Final = "header"


class Objectives(Protocol):
    """InferenceObjectives and InferenceModelRewrites in force."""

    @property
    def rewrites(self) -> ModelRewrites:
        """Of the pool."""

    def priority(self, objective: str) -> int:
        """0 where nobody knows it."""


@dataclass(frozen=True, slots=True)
class OtherModel:
    """The engine is to be asked for `name` instead; `because_of`: an object's name, or `BY_HEADER`."""

    name: str
    because_of: str


class RequestTerms:
    """One a picker. `objectives` None: nobody tells of any."""

    def __init__(self, objectives: Objectives | None = None) -> None:
        self._objectives = objectives

    def asking(self, wishes: Wishes, size_bytes: int, identity: str | None = None) -> Asking:
        """What admission has to know. `identity`: of the agent's session, for requests that name no flow."""
        priority = 0
        if self._objectives is not None and wishes.objective is not None:
            priority = self._objectives.priority(wishes.objective)
        ttft_s = None if wishes.slo_ttft_ms is None else wishes.slo_ttft_ms / 1000
        flow = wishes.fairness_id or identity or wire.DEFAULT_FAIRNESS_ID
        return Asking(priority, flow, size_bytes, ttft_s)

    def other_model(self, wishes: Wishes, model: str, request_id: str) -> OtherModel | None:
        """The client's wish, else a rule's choice; None: the model stays, or none is named."""
        if not model:
            return None
        if wishes.model is not None:
            return None if wishes.model == model else OtherModel(wishes.model, BY_HEADER)
        chosen = None if self._objectives is None else self._objectives.rewrites.choose(model, request_id)
        if chosen is None or chosen.model == model:
            return None
        return OtherModel(chosen.model, chosen.object_name)
