"""Engine ids of mooncake prefillers, asked of their bootstrap server (experimental).

`GET /query` answers with a mapping of data-parallel ranks to engines. Ids are kept until a prefill leg to
that endpoint fails: an engine that was started again has another one. Everything is bounded: the wait,
the answer, the table. The address is the prefiller's own host, so a pool member.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final

from multidict import CIMultiDict

from sidecar.endpoint import HostPort
from sidecar.errors import UpstreamError, UpstreamGarbage, UpstreamTimeout
from sidecar.kv_params import parse_object
from sidecar.plan import Peer
from sidecar.upstream import Call, Upstream, read_bounded

QUERY_TIMEOUT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_ENTRIES: Final = 1024
_MAX_ID_CHARS: Final = 256


class EngineIds:
    """Ids by prefiller; `upstream` speaks plain HTTP, as bootstrap servers do."""

    def __init__(self, upstream: Upstream, port: int, *, timeout_s: float = QUERY_TIMEOUT_S) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s
        self._port = port
        self._known: OrderedDict[HostPort, str] = OrderedDict()

    def server(self, prefiller: Peer) -> HostPort:
        """Where its bootstrap server listens."""
        return HostPort(prefiller.serving.host, self._port)

    def forget(self, prefiller: Peer) -> None:
        """Ask again next time."""
        self._known.pop(prefiller.serving, None)

    async def of(self, prefiller: Peer) -> str:
        """The engine id of the prefiller's rank.

        Raises:
            UpstreamError: no answer in time, or none that names this rank.
        """
        known = self._known.get(prefiller.serving)
        if known is not None:
            self._known.move_to_end(prefiller.serving)
            return known
        found = _engine_id(parse_object(await self._query(prefiller)), prefiller.rank)
        if found is None:
            raise UpstreamGarbage("The bootstrap server of the prefill endpoint does not name its engine")
        self._known[prefiller.serving] = found
        while len(self._known) > MAX_ENTRIES:
            self._known.popitem(last=False)
        return found

    async def _query(self, prefiller: Peer) -> bytes:
        call = Call("bootstrap", self.server(prefiller), "GET", "/query", CIMultiDict())
        try:
            async with asyncio.timeout(self._timeout_s), self._upstream.answer(call) as answer:
                if answer.status != 200:
                    raise UpstreamError("The bootstrap server of the prefill endpoint refused")
                return await read_bounded(answer, MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise UpstreamTimeout("The bootstrap server of the prefill endpoint did not answer") from error


def _engine_id(document: dict[str, Any] | None, rank: int) -> str | None:
    """Never another rank's: two ranks are two engines."""
    entry = document.get(str(rank)) if document is not None else None
    found = entry.get("engine_id") if isinstance(entry, dict) else None
    if isinstance(found, str) and 0 < len(found) <= _MAX_ID_CHARS and found.isprintable():
        return found
    return None
