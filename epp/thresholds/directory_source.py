"""PullThresholds from a mounted directory (a ConfigMap volume, or a plain folder).

Reads every `*.yaml`/`*.yml` in name order; a later name wins field by field. The directory is
compared twice a second, which also sees the link swap by which a kubelet replaces a ConfigMap
(watchers on the files themselves miss it: case S-G05). Content that cannot be used changes nothing:
the last good value stays, and before there is one pulls are off. An empty directory is good content.
Reading and parsing happen in a thread; nothing that is in the directory can end `run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from epp.core.errors import ConfigError
from epp.core.thresholds import NO_THRESHOLDS, PullThresholds
from epp.thresholds.document import MAX_DOCUMENT_BYTES, merge, parse_thresholds
from sidecar.yaml_text import YamlTextError, read_text

log = logging.getLogger(__name__)

POLL_S = 0.5
MAX_FILE_BYTES = MAX_DOCUMENT_BYTES
MAX_FILES = 64
PULLS_OFF = PullThresholds(enabled=False)

_Content = tuple[tuple[str, str], ...]  # name and text of every file


@dataclass(frozen=True, slots=True)
class ThresholdState:
    """What is in force, and whether the newest content was refused."""

    thresholds: PullThresholds = NO_THRESHOLDS
    generation: int = 0
    rejected: str | None = None  # why the newest content is not in force


@dataclass(frozen=True, slots=True)
class _Reading:
    """One content of the directory: what it says, or why it is refused."""

    content: _Content
    thresholds: PullThresholds
    refusal: str | None = None


class DirectoryThresholds:
    """Component: keeps `state` current and calls `on_change` with every new value."""

    def __init__(self, directory: Path, on_change: Callable[[PullThresholds], None]) -> None:
        self._directory = directory
        self._on_change = on_change
        self._last: _Reading | None = None
        self._accepted: _Content | None = None
        self._one_at_a_time = asyncio.Lock()
        self.state = ThresholdState()

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Read the directory once and apply what is new in it; every failure ends in `state.rejected`."""
        async with self._one_at_a_time:
            try:
                self._last = await asyncio.to_thread(_read_again, self._directory, self._last)
                self._apply(self._last)
            except (OSError, ConfigError) as error:
                self._reject(f"{self._directory}: {error}")
            except Exception as error:  # noqa: BLE001  # task guard: a document must not end the picker
                self._reject(f"{self._directory}: fault of the picker: {type(error).__name__}", error)

    def _apply(self, reading: _Reading) -> None:
        if reading.refusal is not None:
            self._reject(reading.refusal)
        elif reading.content == self._accepted:
            self._clear()
        else:
            self._on_change(reading.thresholds)
            self._accepted = reading.content
            self.state = ThresholdState(reading.thresholds, self.state.generation + 1)
            log.info("pull thresholds generation %d in force: %s", self.state.generation, reading.thresholds)

    def _clear(self) -> None:
        if self.state.rejected is not None:
            self.state = ThresholdState(self.state.thresholds, self.state.generation)
            log.info("pull thresholds are those of generation %d again", self.state.generation)

    def _reject(self, why: str, fault: Exception | None = None) -> None:
        if why == self.state.rejected:
            return
        generation = self.state.generation
        kept = f"generation {generation} stays" if self._accepted is not None else "pulls are off"
        log.error("pull thresholds not accepted, %s: %s", kept, why, exc_info=fault)
        if self._accepted is not None:
            self.state = ThresholdState(self.state.thresholds, generation, why)
            return
        first = self.state.thresholds != PULLS_OFF
        self.state = ThresholdState(PULLS_OFF, generation, why)
        if first:
            try:
                self._on_change(PULLS_OFF)
            except Exception:  # task guard, as in `refresh`
                log.exception("pulls could not be switched off")


def _read_again(directory: Path, last: _Reading | None) -> _Reading:
    """Parses only what differs from `last`, so a bad document costs its parsing once."""
    content = _read(directory)
    if last is not None and content == last.content:
        return last
    try:
        return _Reading(content, merge(parse_thresholds(text, name) for name, text in content))
    except ConfigError as error:
        return _Reading(content, NO_THRESHOLDS, str(error))


def _read(directory: Path) -> _Content:
    """A link to nothing is an error, what is no regular file is no document."""
    files = sorted(
        p for p in directory.iterdir() if p.suffix in (".yaml", ".yml") and not p.name.startswith(".")
    )
    if len(files) > MAX_FILES:
        raise ConfigError(f"{len(files)} documents; {MAX_FILES} are allowed")
    content = []
    for path in files:
        path.stat()  # raises for a link to nothing
        if not path.is_file():
            continue
        try:
            content.append((path.name, read_text(path, max_bytes=MAX_FILE_BYTES)))
        except YamlTextError as error:
            raise ConfigError(f"{path.name}: {error}") from error
    return tuple(content)
