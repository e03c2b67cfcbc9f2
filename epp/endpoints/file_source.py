"""Endpoints from a static file (format: docs/design.md), followed while it changes.

The file may be a ConfigMap mount: its directory is watched, so that a swap of the data link is
seen, and its status is compared several times a second for what a watch misses; where there can be
no watch (inotify limit, no permission) the comparison alone does it. A file that cannot be used changes
nothing: the last good rows stay, the error is logged once with path and row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from watchfiles import awatch
from watchfiles._rust_notify import WatchfilesRustInternalError

from engine_plugin import wire as engine_wire
from engine_plugin.identity import EndpointId, format_address
from epp.core.types import Endpoint
from epp.endpoints.scraper import MetricsPageSettings, ScrapeTarget
from sidecar.endpoint_file import EndpointFileError, EndpointRow, load_endpoint_file

_log = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 0.25  # also bounds how long a cancelled `run` takes to end
SETTLE_S: Final = 0.1  # a file that is still being written is not read yet

_Status = tuple[int, int, int, int]  # device, inode, size, time of change


def endpoint_of(row: EndpointRow) -> Endpoint:
    """What the core schedules to: the row's identity, serving address and labels."""
    p2p = format_address((row.host, row.p2p_port))
    return Endpoint(row.id, row.host, row.serving_port, row.labels, p2p_address=p2p)


def scrape_target_of(row: EndpointRow, page: MetricsPageSettings) -> ScrapeTarget:
    """Where the row's metrics are."""
    return ScrapeTarget(row.id, row.host, page.port or row.metrics_port, page.path, page.tls)


class FileSource:
    """Tells of added, changed and removed rows. Callbacks run on the loop and must not block."""

    def __init__(
        self,
        path: Path,
        *,
        on_upsert: Callable[[EndpointRow], None],
        on_remove: Callable[[EndpointId], None],
        on_error: Callable[[str], None] | None = None,
        p2p_base_port: int = engine_wire.P2P_PORT,
    ) -> None:
        """`on_error` hears of every reading that could not be taken over."""
        self._path = path
        self._on_upsert = on_upsert
        self._on_remove = on_remove
        self._on_error = on_error
        self._p2p_base_port = p2p_base_port
        self._rows: dict[EndpointId, EndpointRow] = {}
        self._status: _Status | None = None
        self._watch_fault: str | None = None
        self.loaded: Final = asyncio.Event()  # set by the first good file, and it stays set
        self.error: str | None = None  # why the file as it is now is not in effect
        self.loads = 0
        self.failed_loads = 0

    @property
    def rows(self) -> tuple[EndpointRow, ...]:
        """The rows in effect."""
        return tuple(self._rows.values())

    async def run(self) -> None:
        """Read the file, then follow it until cancelled. A missing file or directory is waited for."""
        await self._reload()
        while True:
            try:
                await self._follow()
            except FileNotFoundError:  # the directory itself is not there (any more)
                pass
            except (OSError, WatchfilesRustInternalError) as error:  # the latter: no watch could be made
                self._note_watch_fault(f"{type(error).__name__}: {error}")
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self._reload_if_changed()

    async def _follow(self) -> None:
        """Watch the directory. An event means: read again; a quiet interval: compare the status."""
        async for changes in awatch(
            self._path.parent,
            watch_filter=None,
            recursive=False,
            step=round(SETTLE_S * 1000),
            debounce=round(SETTLE_S * 5 * 1000),
            rust_timeout=round(CHECK_INTERVAL_S * 1000),
            yield_on_timeout=True,
        ):
            self._watch_fault = None
            if changes:
                await self._reload()
            else:
                await self._reload_if_changed()

    def _note_watch_fault(self, fault: str) -> None:
        if fault != self._watch_fault:
            _log.warning("%s cannot be watched, its status is compared: %s", self._path.parent, fault)
        self._watch_fault = fault

    async def _reload_if_changed(self) -> None:
        if self._read_status() != self._status:
            await self._reload()

    async def _reload(self) -> None:
        """Take the file over if it is good and differs. The status is read first: a change that
        comes between the two is then seen as one more change, never missed."""
        self._status = self._read_status()
        try:
            rows = await asyncio.to_thread(load_endpoint_file, self._path, p2p_base_port=self._p2p_base_port)
        except EndpointFileError as error:
            self._refuse(str(error))
            return
        self.loads += 1
        if self.error is not None:
            _log.info("endpoint file %s is good again", self._path)
        self.error = None
        self._apply({row.id: row for row in rows})
        self.loaded.set()

    def _refuse(self, error: str) -> None:
        self.failed_loads += 1
        if error != self.error:
            _log.error(
                "endpoint file not taken over, %d endpoints stay as they are: %s", len(self._rows), error
            )
        self.error = error
        if self._on_error is not None:
            self._on_error(error)

    def _apply(self, rows: dict[EndpointId, EndpointRow]) -> None:
        """Removals first: an address may pass from one endpoint to another in one change."""
        before, self._rows = self._rows, rows
        for endpoint_id in before.keys() - rows.keys():
            self._on_remove(endpoint_id)
        for endpoint_id, row in rows.items():
            if before.get(endpoint_id) != row:
                self._on_upsert(row)

    def _read_status(self) -> _Status | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
