"""Doubles of the Gateway API Inference Extension's conformance tests, around the handler that decides.

A request may name the endpoints it is to be sent to, and every answer says who served it. That is for the
test of a gateway; in production a client must not choose, so nothing of this is on unless asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace

from epp.core.types import Outcome
from epp.extproc import events as ev
from epp.extproc import wire
from epp.extproc.conversations import RequestHandler


class ConformanceHandler:
    """A `RequestHandler` in front of another one."""

    def __init__(self, inner: RequestHandler) -> None:
        self._inner = inner

    def decide(self, head: ev.RequestHead, body: bytes | None) -> ev.Routing | Awaitable[ev.Routing]:
        """As the inner one, among the endpoints that the request names (`ip` or `ip:port`, by comma)."""
        named = [part.strip() for value in head.headers.all(wire.TEST_SELECTION) for part in value.split(",")]
        wanted = frozenset(name for name in named if name)
        if wanted:
            head = replace(head, subset=_within(wanted, head.subset))
        routing = self._inner.decide(head, body)
        return _showing(routing) if isinstance(routing, ev.Routing) else self._later(routing)

    def first_token(self, token: object) -> None:
        self._inner.first_token(token)

    def finished(self, token: object, outcome: Outcome) -> None:
        self._inner.finished(token, outcome)

    async def _later(self, routing: Awaitable[ev.Routing]) -> ev.Routing:
        return _showing(await routing)


def _showing(routing: ev.Routing) -> ev.Routing:
    return replace(routing, served_header=wire.TEST_SERVED)


def _within(wanted: frozenset[str], subset: frozenset[str] | None) -> frozenset[str]:
    """What both allow, the narrower word for each."""
    if subset is None:
        return wanted
    hosts = {name.rpartition(":")[0] for name in wanted}
    named = {name for name in wanted if name in subset or name.rpartition(":")[0] in subset}
    return frozenset(named | {name for name in subset if name.rpartition(":")[0] in wanted - hosts})
