"""One open watch: what it sends by itself, and how a test can break it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import orjson
from aiohttp import web

from tests.kube.selectors import matches
from tests.kube.status import expired
from tests.kube.store import Change, Store, Table

INITIAL_END = {"k8s.io/initial-events-end": "true"}


class WatchStream:
    """Sends the changes of one table from a revision on."""

    def __init__(
        self,
        store: Store,
        table: Table,
        namespace: str,
        query: dict[str, str],
        *,
        bookmark_every_s: float | None,
    ) -> None:
        self._store = store
        self.table = table
        self._namespace = namespace
        self._labels, self._fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
        self._bookmarks = truthy(query.get("allowWatchBookmarks"))
        self._bookmark_every_s = bookmark_every_s
        self._asked = query.get("resourceVersion", "")
        self._initial = self._asked in ("", "0") or truthy(query.get("sendInitialEvents"))
        self._told_initial_end = truthy(query.get("sendInitialEvents"))
        self._timeout_s = float(query.get("timeoutSeconds") or 1800)
        self._wake = asyncio.Event()
        self._orders: deque[tuple[str, bytes]] = deque()
        self.frozen = False
        self._position = 0

    # --- what tests order ---------------------------------------------------------------------
    def end(self) -> None:
        """End the stream as at its time-out."""
        self._order("end")

    def drop(self) -> None:
        """Break the connection."""
        self._order("drop")

    def expire(self) -> None:
        """Tell in the stream that the revision is too old, and end."""
        self.send(self._line("ERROR", expired("too old resource version").body()))
        self.end()

    def bookmark(self) -> None:
        self._order("bookmark")

    def send(self, line: bytes) -> None:
        """Send these bytes as they are."""
        self._order("send", line)

    def freeze(self) -> None:
        """Keep the connection and send nothing more: what a lost peer looks like."""
        self.frozen = True

    def _order(self, order: str, data: bytes = b"") -> None:
        self._orders.append((order, data))
        self._wake.set()

    # --- the stream ---------------------------------------------------------------------------
    async def run(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        self.table.watchers.add(self._wake)
        try:
            await response.prepare(request)
            await self._start(response)
            await self._follow(request, response)
        except (ConnectionResetError, ConnectionError):
            pass
        finally:
            self.table.watchers.discard(self._wake)
        return response

    async def _start(self, response: web.StreamResponse) -> None:
        self._position = self._store.revision if self._initial else int(self._asked)
        if self._initial:
            for obj in [o for _, o in sorted(self.table.objects.items()) if self._mine(o)]:
                await response.write(self._line("ADDED", obj))
            if self._told_initial_end:
                await response.write(self._bookmark(INITIAL_END))

    async def _follow(self, request: web.Request, response: web.StreamResponse) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_s
        while True:
            self._wake.clear()
            if not self.frozen and not await self._send_changes(response):
                return
            while self._orders:
                order, data = self._orders.popleft()
                if order == "drop" and request.transport is not None:
                    request.transport.abort()
                if order in ("end", "drop"):
                    return
                await response.write(self._bookmark() if order == "bookmark" else data)
            left = end - loop.time()
            if left <= 0 and not self.frozen:
                return
            await self._wait(left)

    async def _wait(self, left_s: float) -> None:
        limit = None if self.frozen else min(left_s, self._bookmark_every_s or left_s)
        try:
            async with asyncio.timeout(limit):
                await self._wake.wait()
        except TimeoutError:
            if self._bookmark_every_s is not None and limit == self._bookmark_every_s:
                self._orders.append(("bookmark", b""))

    async def _send_changes(self, response: web.StreamResponse) -> bool:
        """Whether the stream goes on."""
        if self._position < self.table.floor:
            message = f"too old resource version: {self._position} ({self.table.floor})"
            await response.write(self._line("ERROR", expired(message).body()))
            return False
        changes = [change for change in self.table.log if change.revision > self._position]
        lines = [line for change in changes if (line := self._of_change(change))]
        if changes:
            self._position = changes[-1].revision
        if lines:
            await response.write(b"".join(lines))
        return True

    def _of_change(self, change: Change) -> bytes:
        """An object that enters the selection is ADDED, one that leaves it is DELETED."""
        is_in = change.type != "DELETED" and self._mine(change.new)
        was_in = change.old is not None and self._mine(change.old)
        if is_in:
            return self._line("MODIFIED" if was_in else "ADDED", change.new)
        if not was_in or change.old is None:
            return b""
        meta = change.old["metadata"] | {"resourceVersion": str(change.revision)}
        return self._line("DELETED", change.old | {"metadata": meta})

    def _mine(self, obj: dict[str, Any]) -> bool:
        inside = not self._namespace or obj["metadata"].get("namespace") == self._namespace
        return inside and matches(obj, self._labels, self._fields)

    def _bookmark(self, annotations: dict[str, str] | None = None) -> bytes:
        if not self._bookmarks:
            return b""
        meta: dict[str, Any] = {"resourceVersion": str(self._store.revision)}
        meta |= {"annotations": annotations} if annotations else {}
        kind = self.table.kind
        return self._line("BOOKMARK", {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": meta})

    @staticmethod
    def _line(event: str, obj: dict[str, Any]) -> bytes:
        return orjson.dumps({"type": event, "object": obj}) + b"\n"


def truthy(text: str | None) -> bool:
    """As an API server reads booleans of a query."""
    return (text or "").lower() not in ("", "0", "false")
