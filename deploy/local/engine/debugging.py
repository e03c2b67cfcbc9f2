"""Pages that a real engine does not have: what happened to a request, and faults on purpose.

`POST /faults` exists only with --enable-faults. Bodies are strict, so that a misspelt fault is an
error and not a fault that never happens.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web

from deploy.local.engine.api import read_json
from deploy.local.engine.errors import ApiError, not_found
from deploy.local.engine.events import EventPublisher
from deploy.local.engine.pulls import Pace
from deploy.local.engine.request import RequestLog
from engine_plugin.transport import Faults

_COUNTS: Final = ("hold_after_chunks", "corrupt_block", "throttle_bytes_per_s")
_PACES: Final = "pull_paces"
_FLAGS: Final = ("hold_replay", "stall_lookup", "proceed")


class DebugPages:
    """Handlers; `faults` None leaves the fault page out."""

    def __init__(
        self,
        requests: RequestLog,
        publisher: EventPublisher,
        faults: Faults | None,
        paces: dict[str, Pace] | None = None,
    ) -> None:
        """`paces`: of pulls by source; what is set here is in force for the next pull."""
        self._paces = {} if paces is None else paces
        self._requests = requests
        self._publisher = publisher
        self._faults = faults

    def routes(self) -> list[web.RouteDef]:
        routes = [web.get("/debug/requests/{id}", self.request)]
        if self._faults is not None:
            routes += [web.get("/faults", self.show_faults), web.post("/faults", self.change_faults)]
        return routes

    async def request(self, http: web.Request) -> web.Response:
        report = self._requests.get(http.match_info["id"])
        if report is None:
            raise not_found("no such request")
        return web.json_response(report.as_json())

    async def show_faults(self, _: web.Request) -> web.Response:
        return web.json_response(self._state())

    async def change_faults(self, http: web.Request) -> web.Response:
        body = await read_json(http)
        for name, value in body.items():
            _check(name, value)
        for name, value in body.items():
            self._set(name, value)
        return web.json_response(self._state())

    def _set(self, name: str, value: Any) -> None:
        faults = self._faults
        if faults is None:
            raise not_found("faults are not enabled")
        if name == "hold_replay":
            _switch(self._publisher.replay_released, not value)
        elif name == "proceed":
            _switch(faults.proceed, value)
        elif name == "pull_paces":
            self._paces.clear()
            self._paces.update({source: Pace(*map(float, pace)) for source, pace in value.items()})
        else:
            setattr(faults, name, value)
            if name == "hold_after_chunks" and value is not None:
                faults.holding.clear()  # the next one to come to that point is meant

    def _state(self) -> dict[str, Any]:
        faults = self._faults or Faults()
        return {
            "hold_replay": not self._publisher.replay_released.is_set(),
            "replays_answered": self._publisher.replays_answered,
            "hold_after_chunks": faults.hold_after_chunks,
            "stall_lookup": faults.stall_lookup,
            "corrupt_block": faults.corrupt_block,
            "throttle_bytes_per_s": faults.throttle_bytes_per_s,
            "proceed": faults.proceed.is_set(),
            "pull_paces": {source: [p.floor_ms, p.bytes_per_s] for source, p in self._paces.items()},
            "holding": faults.holding.is_set(),
        }


def _check(name: str, value: Any) -> None:
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise ApiError(f"{name} must be a boolean", param=name)
    elif name in _COUNTS:
        legal = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
        if not legal:
            raise ApiError(f"{name} must be a count or null", param=name)
    elif name == _PACES:
        if not isinstance(value, dict) or not all(map(_is_pace, value.values())):
            raise ApiError(
                f"{name} must be an object: host:port -> [floor in ms, bytes/s above 0]", param=name
            )
    else:
        raise ApiError(f"unknown fault; known: {', '.join(sorted((*_FLAGS, *_COUNTS, _PACES)))}")


def _is_pace(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(type(part) in (int, float) for part in value) and value[0] >= 0 and value[1] > 0


def _switch(event: asyncio.Event, on: bool) -> None:
    if on:
        event.set()
    else:
        event.clear()
