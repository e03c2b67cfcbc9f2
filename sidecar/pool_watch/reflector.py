"""Keeps a sink equal to a selection of objects: list in pages, watch from there, resume, list again.

    no revision known          list (pages; a page token that expired: from the first page again)
    revision known             watch from it, with bookmarks
    server's time-out          watch again from the last revision, at once
    410, in an answer or event list again, at once the first time
    401                        again at once (the credentials were read anew), then with back-off
    anything else              back-off with jitter, the server's Retry-After respected
    silence                    the connection is given up after `read_deadline_s` and counts as a failure
    a stream that ends at once counts as a failure

The sink is told of a list as a whole, so that nobody sees half of one; while the server is away it keeps
what it has. The reflector itself keeps no objects. It never ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import aiohttp
import msgspec

from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.backoff import Backoff, BackoffRule
from sidecar.pool_watch.errors import Expired, KubeError, Malformed, Unauthorised, failure
from sidecar.pool_watch.objects import Event, Failure, Named, Page
from sidecar.pool_watch.resources import Call, Selection
from sidecar.pool_watch.status import WatchStatus

_log = logging.getLogger(__name__)

V = TypeVar("V")
_read_page = msgspec.json.Decoder(Page).decode
_read_event = msgspec.json.Decoder(Event).decode
_read_named = msgspec.json.Decoder(Named).decode
_read_failure = msgspec.json.Decoder(Failure).decode

_MAX_EVENT_BYTES: Final = 8 << 20  # an object has at most 1.5 MiB in the server's store
_MAX_RESTARTS: Final = 3  # of one list, by expired page tokens
_MAX_TOLD: Final = 5  # unreadable objects that are logged; the others are counted
_INSTANT_S: Final = 1.0  # a stream shorter than this is a failure, whatever it told
_HEALTHY_S: Final = 60.0  # after so long the back-off starts anew


class Sink(Protocol[V]):
    """Where the objects go, by name. Called on the event loop; must not block."""

    def replace(self, objects: dict[str, V], /) -> None:
        """These are all."""

    def put(self, name: str, value: V, /) -> None:
        """One is new or has changed."""

    def remove(self, name: str, /) -> None:
        """One is gone."""


@dataclass(frozen=True, slots=True)
class WatchRules:
    """Sizes and times of a watch."""

    page_objects: int = 250
    read_deadline_s: float = 90.0  # above a server's interval of bookmarks, about a minute
    shortest_watch_s: int = 240
    longest_watch_s: int = 480
    backoff: BackoffRule = field(default_factory=BackoffRule)


class Reflector(Generic[V]):
    """Component: `run` until cancelled."""

    def __init__(
        self,
        access: KubeAccess,
        selection: Selection,
        view: Callable[[msgspec.Raw], V],
        sink: Sink[V],
        *,
        rules: WatchRules | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`view` makes the small value that is kept of an object's JSON."""
        self._access = access
        self._selection = selection
        self._view = view
        self._sink = sink
        self._rules = rules or WatchRules()
        self._rng = rng or random.Random()
        self._clock = clock
        self._pause = pause
        self._revision: str | None = None
        self._backoff = Backoff(self._rules.backoff, self._rng)
        self.status: Final = WatchStatus(str(selection), selection.resource.qualified)
        self.synced: Final = asyncio.Event()
        self.settled: Final = asyncio.Event()  # synced, or failed for the first time

    async def run(self) -> None:
        while True:
            started_s = self._clock()
            try:
                if self._revision is None:
                    await self._list()
                await self._watch()
            except KubeError as error:
                delay_s = self._failed(error, started_s)
            else:
                if self._clock() - started_s >= _INSTANT_S:
                    self._backoff.succeeded()
                    continue
                delay_s = self._failed(Malformed(f"watch {self.status.what}: it ended at once"), started_s)
            if delay_s > 0:
                await self._pause(delay_s)

    def _failed(self, error: KubeError, started_s: float) -> float:
        """Note it; seconds to wait."""
        if self._clock() - started_s >= _HEALTHY_S:
            self._backoff.succeeded()
        if isinstance(error, Expired):
            self._revision = None
            self.status.expired += 1
        else:
            self.status.failures += 1
            if self.status.error is None:
                _log.warning("%s: %s (the last known state is served)", self.status.what, error)
            self.status.error = str(error)
        self.settled.set()
        return self._backoff.failed(
            asked_s=error.retry_after_s, at_once=isinstance(error, Expired | Unauthorised)
        )

    # --- list -------------------------------------------------------------------------------------
    async def _list(self) -> None:
        objects: dict[str, V] = {}
        token, restarts = "", 0
        while True:
            try:
                page = await self._page(token)
            except Expired:
                restarts += 1
                if not token or restarts > _MAX_RESTARTS:
                    raise
                objects, token = {}, ""
                continue
            for item in page.items or ():
                self._take(item, objects.__setitem__)
            token = page.metadata.next_page or ""
            if not token:
                break
            await asyncio.sleep(0)  # others may run between two pages
        self.status.lists += 1
        self._sink.replace(objects)
        self._revision = page.metadata.revision
        self._recovered()
        self.status.synced = True
        self.synced.set()
        self.settled.set()

    async def _page(self, token: str) -> Page:
        query = {"limit": str(self._rules.page_objects)} | ({"continue": token} if token else {})
        raw = await self._access.read(self._call("list", query))
        self._heard()
        try:
            return _read_page(raw)
        except msgspec.DecodeError as error:
            raise Malformed(f"list {self.status.what}: the answer is not a list of objects") from error

    # --- watch ------------------------------------------------------------------------------------
    async def _watch(self) -> None:
        """Follow until the server ends the stream."""
        seconds = self._rng.randint(self._rules.shortest_watch_s, self._rules.longest_watch_s)
        query = {
            "watch": "true",
            "resourceVersion": self._revision or "",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        self.status.watches += 1
        call = self._call("watch", query)
        async with self._access.request(call, total_s=None, read_s=self._rules.read_deadline_s) as response:
            self._recovered()
            await self._follow(response)

    async def _follow(self, response: aiohttp.ClientResponse) -> None:
        rest = b""
        async for chunk in response.content.iter_any():
            self._heard()
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_EVENT_BYTES:
                raise Malformed(f"watch {self.status.what}: an event of more than {_MAX_EVENT_BYTES} bytes")
            for line in lines:
                if line.strip():
                    self._event(line)

    def _event(self, line: bytes) -> None:
        try:
            event = _read_event(line)
            if event.type == "ERROR":
                raise self._told(_read_failure(event.object))
            meta = _read_named(event.object).metadata
        except msgspec.DecodeError as error:
            self._revision = None  # what was in it is lost: only a list can tell
            raise Malformed(f"watch {self.status.what}: an event that cannot be read") from error
        if event.type == "DELETED":
            self._sink.remove(meta.name)
        elif event.type in ("ADDED", "MODIFIED"):
            self._take(event.object, self._sink.put)
        self._revision = meta.revision

    def _told(self, status: Failure) -> KubeError:
        """The failure that an ERROR event carries."""
        selection = self._selection
        return failure(
            status.code or 500,
            status.message or "",
            verb="watch",
            resource=selection.resource.qualified,
            namespace=selection.namespace,
            version=selection.resource.version,
        )

    def _take(self, obj: msgspec.Raw, put: Callable[[str, V], None]) -> None:
        """An object that cannot be understood is left out and counted."""
        try:
            name, value = _read_named(obj).metadata.name, self._view(obj)
            if not name:
                raise ValueError("no name")
        except (msgspec.DecodeError, ValueError) as error:
            self.status.unreadable += 1
            if self.status.unreadable <= _MAX_TOLD:
                _log.warning("%s: an object that cannot be understood: %s", self.status.what, error)
            return
        put(name, value)

    def _call(self, verb: str, query: dict[str, str]) -> Call:
        selection = self._selection
        return Call(verb, selection.resource, selection.namespace, query=selection.query() | query)

    def _heard(self) -> None:
        self.status.contact_s = self._clock()

    def _recovered(self) -> None:
        self._heard()
        if self.status.error is not None:
            self.status.error = None
            _log.info("%s: the API server answers again", self.status.what)
