"""PullThresholds from a mounted directory (ConfigMap volumes, or a plain folder).

Reads every `*.yaml`/`*.yml` in it and in its sub-directories (one volume each: several ConfigMaps), named
`file` and `volume/file`. The directory is compared twice a second, which also sees the link swap by
which a kubelet replaces a ConfigMap (watchers on the files themselves miss it: case S-G05); a swap in the
middle of reading means: read again, so that no generation is half of two. Content that cannot be used
changes nothing (`in_force`). An empty directory is good content. Reading and parsing happen in a thread;
nothing that is in the directory can end `run`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from epp.core.errors import ConfigError
from epp.core.thresholds import PullThresholds
from epp.thresholds.document import MAX_DOCUMENT_BYTES
from epp.thresholds.in_force import Reading, ThresholdsInForce, ThresholdState, read_documents
from epp.thresholds.merge import Texts
from epp.thresholds.mounts import frozen_mount, read_mounts
from sidecar.yaml_text import YamlTextError, read_text

POLL_S = 0.5
MAX_FILE_BYTES = MAX_DOCUMENT_BYTES
MAX_FILES = 64  # documents, and volumes
_ATTEMPTS = 3  # to read without a swap in between
_DATA = "..data"


class DirectoryThresholds:
    """Component: keeps `state` current and calls `on_change` with every new value."""

    def __init__(
        self,
        directory: Path,
        on_change: Callable[[PullThresholds], None],
        mounts: Callable[[], Mapping[str, str]] = read_mounts,
    ) -> None:
        self._directory = directory
        self._mounts = mounts
        self._in_force = ThresholdsInForce(f"directory {directory}", on_change)
        self._last: Reading | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def state(self) -> ThresholdState:
        return self._in_force.state

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Read the directory once and apply what is new in it; every failure ends in `state.rejected`."""
        async with self._one_at_a_time:
            try:
                self._last = await asyncio.to_thread(self._read_again, self._last)
                self._in_force.offer(self._last)
            except (OSError, ConfigError) as error:
                self._in_force.reject(f"{self._directory}: {error}")
            except Exception as error:  # noqa: BLE001  # task guard: a document must not end the picker
                fault = f"{self._directory}: fault of the picker: {type(error).__name__}"
                self._in_force.reject(fault, error)

    def _read_again(self, last: Reading | None) -> Reading:
        """Parses only what differs from `last`, so a bad document costs its parsing once."""
        texts = _read_unswapped(self._directory, self._mounts())
        return last if last is not None and texts == last.texts else read_documents(texts)


def _read_unswapped(directory: Path, mounts: Mapping[str, str]) -> Texts:
    """The documents of one moment. Raises ConfigError, OSError."""
    failure: OSError | None = None
    for _ in range(_ATTEMPTS):
        before = _data_links(directory)
        try:
            texts = _read(directory, mounts)
        except OSError as error:  # the old directory goes right after a swap
            failure = error
        else:
            failure = None
            if _data_links(directory) == before:
                return texts
    raise failure or ConfigError("it is replaced faster than it can be read")


def _volumes(directory: Path) -> list[tuple[str, Path]]:
    """The directory itself and its visible sub-directories, with the prefix of their documents' names."""
    found = [(f"{p.name}/", p) for p in sorted(directory.iterdir()) if p.name[0] != "." and p.is_dir()]
    if len(found) > MAX_FILES:
        raise ConfigError(f"{len(found)} sub-directories; {MAX_FILES} are allowed")
    return [("", directory), *found]


def _data_links(directory: Path) -> tuple[str | None, ...]:
    """Where the `..data` link of every volume leads: what a kubelet swaps."""
    links: list[str | None] = []
    for _, volume in _volumes(directory):
        try:
            links.append(os.readlink(volume / _DATA))
        except OSError:
            links.append(None)
    return tuple(links)


def _read(directory: Path, mounts: Mapping[str, str]) -> Texts:
    """A link to nothing is an error, what is no regular file is no document."""
    named: list[tuple[str, Path]] = []
    for prefix, volume in _volumes(directory):
        resolved = volume.resolve()
        files = [p for p in resolved.iterdir() if p.suffix in (".yaml", ".yml") and p.name[0] != "."]
        if frozen := frozen_mount(resolved, files, mounts):
            raise ConfigError(frozen)
        named += [(prefix + path.name, path) for path in files]
    if len(named) > MAX_FILES:
        raise ConfigError(f"{len(named)} documents; {MAX_FILES} are allowed")
    texts = []
    for name, path in sorted(named):
        path.stat()  # raises for a link to nothing
        if not path.is_file():
            continue
        try:
            texts.append((name, read_text(path, max_bytes=MAX_FILE_BYTES)))
        except YamlTextError as error:
            raise ConfigError(f"{name}: {error}") from error
    return tuple(texts)
