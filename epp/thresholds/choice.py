"""Which of two inputs is in force: the API watch where it has a document, else the mounted directory.

The watch wins because it is faster, and because a mount may be forgotten in a pod template. It has no say
as long as it has never been in sync, or when its ConfigMaps are gone. The active input is in `state.source`,
and what either of them refuses is visible. Generations are counted here, so they only ever grow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from epp.core.thresholds import PullThresholds
from epp.thresholds.config_maps import ConfigMapThresholds
from epp.thresholds.directory_source import DirectoryThresholds
from epp.thresholds.in_force import ThresholdState


class ThresholdChoice:
    """Component: one or both inputs. `connect` them before `run`."""

    def __init__(self, on_change: Callable[[PullThresholds], None]) -> None:
        self._on_change = on_change
        self._directory: DirectoryThresholds | None = None
        self._watch: ConfigMapThresholds | None = None
        self._by_directory: PullThresholds | None = None
        self._by_watch: PullThresholds | None = None
        self._chosen: PullThresholds | None = None
        self._published: PullThresholds | None = None

    def connect(self, directory: DirectoryThresholds | None, watch: ConfigMapThresholds | None) -> None:
        self._directory, self._watch = directory, watch

    # --- what the inputs call -----------------------------------------------------------------------
    def from_directory(self, thresholds: PullThresholds) -> None:
        self._by_directory = thresholds
        self._publish()

    def from_watch(self, thresholds: PullThresholds) -> None:
        self._by_watch = thresholds
        self._publish()

    def _watch_wins(self) -> bool:
        if self._watch is None or self._directory is None:
            return self._directory is None
        return self._watch.has_documents and self._by_watch is not None

    def _publish(self) -> None:
        chosen = self._by_watch if self._watch_wins() else self._by_directory
        if chosen is None or chosen is self._chosen:
            return
        least = 0 if self._published is None else self._published.generation + 1
        self._chosen = chosen
        self._published = replace(chosen, generation=max(chosen.generation, least))
        self._on_change(self._published)

    # --- what the process asks ----------------------------------------------------------------------
    @property
    def state(self) -> ThresholdState:
        first, second = self._directory, self._watch
        active, other = (second, first) if self._watch_wins() else (first, second)
        if active is None:
            return ThresholdState()
        state = active.state
        refusals = [state.rejected, other.state.rejected if other is not None else None]
        rejected = "; ".join(refusal for refusal in refusals if refusal) or None
        return replace(state, thresholds=self._published or state.thresholds, rejected=rejected)

    @property
    def settled(self) -> bool:
        return self._watch is None or self._watch.settled.is_set()

    async def wait_settled(self) -> None:
        """Until the first content is in force, refused, or known to be out of reach."""
        if self._watch is not None:
            await self._watch.settled.wait()

    async def refresh(self) -> None:
        """Read the directory now, so that its thresholds are in force before the first request."""
        if self._directory is not None:
            await self._directory.refresh()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self._directory, self._watch):
                if part is not None:
                    group.create_task(part.run())
