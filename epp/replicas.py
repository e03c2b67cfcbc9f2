"""Joins this replica to its siblings: takes a snapshot at start, and gives one to whoever asks later.

Order at start: the snapshot comes first (it brings the index seed), then the index is made, then the
endpoints are discovered; a row is adopted when its endpoint is added, before its events are subscribed
to, so that the first replay already confirms it. Nothing here is on unless it was configured, and
nothing that a sibling does keeps the picker from starting.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine_plugin.identity import EndpointId
from epp.core.adoption import AdoptionRefused, ExportedView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import ConfigError
from epp.core.hashing import INDEX_SEED_BYTES
from epp.siblings import wire
from epp.siblings.client import ClientSettings, SiblingAddress, Snapshot, fetch_snapshot
from epp.siblings.holding import HeldRows
from epp.siblings.reader import IndexIdentity
from epp.siblings.server import ServerSettings, SnapshotServer
from epp.siblings.tls import MutualTls
from epp.telemetry.snapshots import SnapshotFacts

log = logging.getLogger(__name__)

STEP_BLOCKS = 4_096  # of a view taken over in one turn of the loop: some 5 ms compiled
EXPORT_STEP_BLOCKS = 16_384  # of a view given to a sibling in one turn: some 1 ms
_Clock = Callable[[], float]
_AddressOf = Callable[[EndpointId], tuple[str, int] | None]


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """`port` None: give no snapshots; no `siblings`: ask for none."""

    tls_path: Path | None = None
    siblings: tuple[SiblingAddress, ...] = ()
    host: str = "0.0.0.0"
    port: int | None = None
    client: ClientSettings = field(default_factory=ClientSettings)
    keep_s: float = 60.0  # rows whose endpoints discovery has not named yet


class Replicas:
    """One a picker. `take_seed` first, then `serve_from`; `offer` at every endpoint that is added."""

    def __init__(self, settings: ReplicaSettings, clock: _Clock = time.monotonic) -> None:
        """Raises ConfigError where certificates are missing or cannot be used."""
        self._settings = settings
        self._clock = clock
        self._tls: MutualTls | None = None
        if settings.port is not None or settings.siblings:
            if settings.tls_path is None:
                raise ConfigError("snapshots need mutual TLS: give --sibling-tls-path")
            self._tls = MutualTls(settings.tls_path)
        self._snapshot: Snapshot | None = None
        self._held = HeldRows((), 0.0)
        self._refused: Counter[str] = Counter()
        self._adopting: dict[EndpointId, Iterator[int]] = {}
        self.server: SnapshotServer | None = None

    @property
    def keep_s(self) -> float:
        """How long after the snapshot its rows are of use; then `expire`."""
        return self._settings.keep_s

    async def take_seed(self, given: bytes | None, scheme: str) -> bytes:
        """Ask the siblings, and say under which seed the index is to be made: the one `given`, else a
        sibling's, else a random one."""
        if self._tls is not None and self._settings.siblings:
            identity = IndexIdentity(scheme, given)
            settings = self._settings
            snapshot = await fetch_snapshot(
                settings.siblings, self._tls.client_context, identity, settings.client
            )
            self._held = HeldRows(snapshot.rows, self._clock() + settings.keep_s)
            self._snapshot = Snapshot(
                snapshot.outcome, snapshot.sibling, received_bytes=snapshot.received_bytes
            )
            given = given or snapshot.seed
        return given or secrets.token_bytes(INDEX_SEED_BYTES)

    def offer(
        self,
        picker: EndpointPicker,
        endpoint: EndpointId,
        host: str,
        events_port: int,
        then: Callable[[], None],
    ) -> None:
        """The endpoint was just added to the picker: let it take over a sibling's view of it, a little in
        every turn of the loop, and call `then` when that is over or came to nothing."""
        view = self._held.take(endpoint, host, events_port, self._clock())
        self.withdraw(endpoint)
        if view is None:
            then()
            return
        steps = picker.cache.adopt_steps(endpoint, view, STEP_BLOCKS)
        self._adopting[endpoint] = steps
        self._adopt_on(endpoint, view, steps, then)

    def is_adopting(self, endpoint: EndpointId) -> bool:
        """Whether `then` of the endpoint's offer is still to come: nothing may be heard of it before."""
        return endpoint in self._adopting

    def withdraw(self, endpoint: EndpointId) -> None:
        """The endpoint has left or begins anew: what it takes over is of no use, `then` is not called."""
        self._adopting.pop(endpoint, None)

    def _adopt_on(
        self, endpoint: EndpointId, view: ExportedView, steps: Iterator[int], then: Callable[[], None]
    ) -> None:
        if self._adopting.get(endpoint) is not steps:
            return
        try:
            next(steps)
        except StopIteration:
            self._log_adopted(endpoint, view)
        except AdoptionRefused as error:
            self._refused[error.reason] += 1
            log.warning("snapshot of %s refused: %s", endpoint, error.reason)
        else:
            asyncio.get_running_loop().call_soon(self._adopt_on, endpoint, view, steps, then)
            return
        del self._adopting[endpoint]
        then()

    def _log_adopted(self, endpoint: EndpointId, view: ExportedView) -> None:
        blocks, batch = len(view.dump.names) // 8, view.position.next_seq - 1
        log.info("snapshot of %s: %d blocks up to batch %d await its replay", endpoint, blocks, batch)

    def expire(self) -> None:
        """Drop rows that nobody asked for in time."""
        dropped = self._held.expire(self._clock())
        if dropped:
            log.info("snapshot: %d endpoints were not discovered in time", dropped)

    def serve_from(self, picker: EndpointPicker, seed: bytes, scheme: str, address_of: _AddressOf) -> None:
        """Bind the snapshot port, if one is configured.

        Raises:
            ConfigError: the port cannot be had.
        """
        settings = self._settings
        if self._tls is None or settings.port is None:
            return
        source = _PickerSource(picker, seed, scheme, address_of)
        server = SnapshotServer(
            source, self._tls.server_context, ServerSettings(settings.host, settings.port)
        )
        server.start()
        self.server = server
        log.info("giving snapshots on port %d", server.port)

    def facts(self) -> SnapshotFacts:
        return SnapshotFacts(
            fetched=self._snapshot,
            holding=self._held.counters,
            held=len(self._held),
            refused=dict(self._refused),
            served=None if self.server is None else self.server.counters,
        )


@dataclass(frozen=True, slots=True)
class _PickerSource:
    """What the server gives: the picker's views of the endpoints as they are when they are sent."""

    picker: EndpointPicker
    seed: bytes = field(repr=False)
    scheme: str
    address_of: _AddressOf

    def __len__(self) -> int:
        return min(len(self.picker.endpoints), wire.MAX_ROWS)

    def rows(self) -> Iterator[wire.Row | None]:
        for endpoint in self.picker.endpoints[: wire.MAX_ROWS]:
            address = self.address_of(endpoint.id)
            if address is None:
                continue
            for view in self.picker.cache.export_steps(endpoint.id, EXPORT_STEP_BLOCKS):
                yield None if view is None else wire.Row(endpoint.id, *address, view)
