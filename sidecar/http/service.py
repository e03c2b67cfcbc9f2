"""What a listener's connections share, and the requests that they give to its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from multidict import CIMultiDict

from sidecar.http.answer import Answer
from sidecar.http.body import Body
from sidecar.http.message import BadMessage, Framing, RequestHead


@dataclass(frozen=True, slots=True)
class Request:
    """One request, and where its answer goes. `remote`: the client's address, without its port."""

    head: RequestHead
    body: Body
    answer: Answer
    remote: str | None

    @property
    def headers(self) -> CIMultiDict[str]:
        return self.head.headers

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def has_body(self) -> bool:
        return self.head.framing is not Framing.NONE


class Connection(Protocol):
    """One of a client, as its listener sees it."""

    def check(self, now_s: float) -> None:
        """Close if a limit has passed."""

    def stop(self) -> None:
        """Close as soon as nothing is being served."""

    def cancel(self) -> asyncio.Task[None] | None:
        """End now; returns the handler to wait for."""


Handler = Callable[[Request], Awaitable[None]]


@dataclass(slots=True)
class Service:
    """What all connections of a listener share. `refusal`: the JSON body that answers what is not HTTP."""

    handler: Handler
    refusal: Callable[[BadMessage], bytes]
    head_s: float
    idle_s: float
    keep_alive_s: float
    draining: bool = False
    connections: set[Connection] = field(default_factory=set)
