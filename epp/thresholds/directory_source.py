"""PullThresholds from a mounted directory (a ConfigMap volume, or a plain folder).

Reads every `*.yaml`/`*.yml` in name order; a later name wins field by field. The directory is
compared twice a second, which also sees the link swap by which a kubelet replaces a ConfigMap
(watchers on the files themselves miss it: case S-G05). Invalid content keeps the last good value.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from epp.core.errors import ConfigError
from epp.core.thresholds import NO_THRESHOLDS, PullThresholds
from epp.thresholds.document import merge, parse_thresholds

log = logging.getLogger(__name__)

POLL_S = 0.5
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ThresholdState:
    """What is in force, and whether the newest content was refused."""

    thresholds: PullThresholds = NO_THRESHOLDS
    generation: int = 0
    rejected: str | None = None  # why the newest content is not in force


class DirectoryThresholds:
    """Component: keeps `state` current and calls `on_change` with every new value."""

    def __init__(self, directory: Path, on_change: Callable[[PullThresholds], None]) -> None:
        self._directory = directory
        self._on_change = on_change
        self._seen: tuple[tuple[str, str], ...] | None = None
        self.state = ThresholdState()

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Read the directory once and apply what is new in it."""
        try:
            content = await asyncio.to_thread(_read, self._directory)
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            self._reject(f"{self._directory}: {error}")
            return
        if content == self._seen:
            return
        self._seen = content
        try:
            thresholds = merge(parse_thresholds(text, name) for name, text in content)
        except ConfigError as error:
            self._reject(str(error))
            return
        self.state = ThresholdState(thresholds, self.state.generation + 1)
        log.info("pull thresholds generation %d in force: %s", self.state.generation, thresholds)
        self._on_change(thresholds)

    def _reject(self, why: str) -> None:
        if why != self.state.rejected:
            log.error("pull thresholds not accepted, generation %d stays: %s", self.state.generation, why)
        self.state = ThresholdState(self.state.thresholds, self.state.generation, why)


def _read(directory: Path) -> tuple[tuple[str, str], ...]:
    files = sorted(
        p for p in directory.iterdir() if p.suffix in (".yaml", ".yml") and not p.name.startswith(".")
    )
    for path in files:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path.name} is over {MAX_FILE_BYTES} bytes")
    return tuple((path.name, path.read_text(encoding="utf-8")) for path in files)
