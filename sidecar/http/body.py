"""A body on its way in: read piece by piece, taken whole, or piped on. One consumer, one event loop.

Whoever feeds it is told to stop reading its socket when nobody takes the pieces, or when the sink they are
piped into cannot write as fast. After its end a body holds nothing of the connection it came by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from sidecar.http.message import BodyOverLimit, HttpFault

_MANY_PIECES: Final = 256  # a list of them costs more than their bytes
HIGH_WATER_BYTES: Final = 256 << 10  # of pieces that nobody has asked for yet


class Flow(Protocol):
    """The connection a body comes by."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Sink(Protocol):
    """What a body is piped into: pieces, then either `end` or `fail`, all called by the connection.

    `flush`: no more pieces for now; what was written has to go out."""

    def write(self, piece: bytes) -> None: ...

    def flush(self) -> None: ...

    def end(self) -> None: ...

    def fail(self, fault: HttpFault) -> None: ...


class Body:
    """`ended`: nothing more will come (or it broke, see `fault`)."""

    __slots__ = (
        "_discarding",
        "_flow",
        "_held",
        "_limit_bytes",
        "_on_wanted",
        "_packed",
        "_pieces",
        "_sink",
        "_size_bytes",
        "_waiter",
        "ended",
        "fault",
    )

    def __init__(self, flow: Flow | None, on_wanted: Callable[[], None] | None = None) -> None:
        """`flow` None: there is no body. `on_wanted` is called once, when the first byte is asked for."""
        self._flow = flow
        self._on_wanted = on_wanted
        self._pieces: list[bytes] = []
        self._packed = bytearray()  # what came before them
        self._size_bytes = 0
        self._limit_bytes: int | None = None  # while somebody waits for the whole of it
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._held = False
        self._discarding = False
        self.ended = flow is None
        self.fault: HttpFault | None = None

    @property
    def unwanted(self) -> bool:
        """Whether `on_wanted` has still to be called."""
        return self._on_wanted is not None

    # --- the connection's side -------------------------------------------------------------------

    def feed(self, piece: bytes) -> None:
        """A piece has arrived."""
        if self._sink is not None:
            self._sink.write(piece)
        elif not self._discarding:
            self._pieces.append(piece)
            self._size_bytes += len(piece)
            if self._limit_bytes is None:
                if self._size_bytes > HIGH_WATER_BYTES:
                    self.hold()
                self._wake()
            elif self._size_bytes > self._limit_bytes:
                self._wake()
            if len(self._pieces) >= _MANY_PIECES:
                self._packed += b"".join(self._pieces)
                self._pieces.clear()

    def flush(self) -> None:
        """All that has arrived was fed."""
        if self._sink is not None:
            self._sink.flush()

    def end(self) -> None:
        """The last piece has arrived."""
        self.ended = True
        self._flow = None
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.end()
        self._wake()

    def fail(self, fault: HttpFault) -> None:
        """It broke; pieces that are here can still be read."""
        if self.ended:
            return
        self.fault = fault
        self.ended = True
        self._flow = None
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.fail(fault)
        self._wake()

    # --- the consumer's side ---------------------------------------------------------------------

    async def read(self) -> bytes:
        """What is here, else the next piece; empty at the end.

        Raises:
            HttpFault: it broke.
        """
        self._want()
        while not self._size_bytes:
            if self.ended:
                if self.fault is not None:
                    raise self.fault
                return b""
            await self._wait()
        return self._take()

    async def whole(self, limit_bytes: int) -> bytes:
        """All of it.

        Raises:
            BodyOverLimit: more than `limit_bytes`.
            HttpFault: it broke.
        """
        self._want()
        self._limit_bytes = limit_bytes
        if not self.ended and self._size_bytes <= limit_bytes:
            self.release()
            await self._wait()
        self._limit_bytes = None
        if self._size_bytes > limit_bytes:
            raise BodyOverLimit
        found = self._take()
        if self.fault is not None:
            raise self.fault
        return found

    def pipe(self, sink: Sink, *, congested: bool = False) -> None:
        """Give everything to `sink`, now and as it arrives. `congested`: `release` is to come."""
        self._want()
        if congested:
            self.hold()
        else:
            self.release()
        if self._size_bytes:
            sink.write(self._take(release=False))  # may hold it, too
        if not self.ended:
            self._sink = sink
        elif self.fault is None:
            sink.end()
        else:
            sink.fail(self.fault)

    def discard(self) -> None:
        """Nobody wants the rest."""
        self._sink = None
        self._discarding = True
        self._pieces.clear()
        self._packed.clear()
        self._size_bytes = 0
        self.release()

    def hold(self) -> None:
        """Stop the pieces for a while."""
        if not self._held and self._flow is not None:
            self._held = True
            self._flow.pause_reading()

    def release(self) -> None:
        """Let them come again."""
        if self._held:
            self._held = False
            if self._flow is not None:
                self._flow.resume_reading()

    def _take(self, *, release: bool = True) -> bytes:
        pieces, self._pieces = self._pieces, []
        self._size_bytes = 0
        if self._packed:
            pieces.insert(0, bytes(self._packed))
            self._packed.clear()
        if release:
            self.release()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _want(self) -> None:
        if self._on_wanted is not None:
            wanted, self._on_wanted = self._on_wanted, None
            wanted()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
