"""The pool's members, kept fresh: the sidecar's allow-list, and its input from the static endpoint file.

An address is allowed only with its port: another port of a pool member is not a member. The input in a
cluster is `pool_members`. The file is looked at once a second (its identity, size and time; a ConfigMap's
link swap changes them), read in a thread, and taken whole or not at all: after a bad write the last good
rows stay.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine_plugin.identity import EndpointId
from sidecar.endpoint import EndpointError, HostPort, canonical_host
from sidecar.endpoint_file import EndpointFileError, EndpointRow, load_endpoint_file

_log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class AllowListObserver(Protocol):
    """What telemetry wants to know of a reload."""

    def endpoint_file(self, *, rows: int, failed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stamp:
    device: int
    inode: int
    size_bytes: int
    modified_ns: int


class AllowList:
    """Members by serving address. Without a file it knows nobody."""

    def __init__(self, rows: Iterable[EndpointRow] = (), *, enforced: bool = True) -> None:
        self._enforced = enforced
        self._by_id: dict[EndpointId, EndpointRow] = {}
        self._by_address: dict[HostPort, EndpointRow] = {}
        self._hosts: Counter[str] = Counter()
        self.replace(rows)

    @property
    def enforced(self) -> bool:
        """Whether an address that is not a member is refused."""
        return self._enforced

    def __len__(self) -> int:
        return len(self._by_address)

    def replace(self, rows: Iterable[EndpointRow]) -> None:
        """Take new rows; readers see the old or the new ones, never a mixture."""
        by_id = {row.id: row for row in rows}
        self._by_id, self._by_address = by_id, {row.serving: row for row in by_id.values()}
        self._hosts = Counter(row.host for row in by_id.values())

    def put(self, row: EndpointRow) -> None:
        """Add one member, or take its newer row."""
        self.remove(row.id)
        self._by_id[row.id] = self._by_address[row.serving] = row
        self._hosts[row.host] += 1

    def remove(self, endpoint: EndpointId) -> None:
        """Forget one member; an address that has passed to another stays the other's."""
        row = self._by_id.pop(endpoint, None)
        if row is None:
            return
        if self._by_address.get(row.serving) is row:
            del self._by_address[row.serving]
        self._hosts[row.host] -= 1
        if not self._hosts[row.host]:
            del self._hosts[row.host]

    def find(self, address: HostPort) -> EndpointRow | None:
        """The member that serves at exactly this address and port."""
        return self._by_address.get(address)

    def has_host(self, host: str | None) -> bool:
        """Whether a connection from `host` comes from a pool member."""
        if host is None:
            return False
        try:
            return canonical_host(host) in self._hosts
        except EndpointError:
            return False


class EndpointFileWatch:
    """Feeds one file into an allow-list until cancelled."""

    def __init__(
        self, path: Path, allow_list: AllowList, observer: AllowListObserver, *, p2p_base_port: int
    ) -> None:
        self._path = path
        self._allow_list = allow_list
        self._observer = observer
        self._p2p_base_port = p2p_base_port
        self._stamp: _Stamp | None = None

    def load_first(self) -> None:
        """Read the file at start.

        Raises:
            EndpointFileError: there are no last good rows yet, so a bad file is fatal.
        """
        self._stamp = self._look()
        self._take(self._read())

    async def run(self, interval_s: float = LOOK_INTERVAL_S) -> None:
        """Look again and again; never ends by a fault of the file."""
        while True:
            await asyncio.sleep(interval_s)
            await self.refresh()

    async def refresh(self) -> bool:
        """Read the file again if it changed; whether new rows were taken."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            rows = await asyncio.to_thread(self._read)
        except EndpointFileError as error:
            _log.warning("endpoint file not taken, keeping %d rows: %s", len(self._allow_list), error)
            self._observer.endpoint_file(rows=len(self._allow_list), failed=True)
            return False
        self._take(rows)
        _log.info("endpoint file taken: %d rows", len(rows))
        return True

    def _read(self) -> tuple[EndpointRow, ...]:
        return load_endpoint_file(self._path, p2p_base_port=self._p2p_base_port)

    def _take(self, rows: tuple[EndpointRow, ...]) -> None:
        self._allow_list.replace(rows)
        self._observer.endpoint_file(rows=len(rows), failed=False)

    def _look(self) -> _Stamp | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
