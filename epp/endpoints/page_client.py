"""One kept connection to one engine, over which a page is asked for again and again. HTTP/1.1, GET only.

A general client spends more on a page than everything else that happens to it here. Knows lengths, chunks
and the end of a connection; follows no redirect, unpacks nothing, and is bounded in bytes and in time.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from dataclasses import dataclass
from typing import Final

MAX_HEAD_BYTES: Final = 32 << 10
_HEAD_END: Final = b"\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})(?: [^\r\n]*)?\r\n")
_FIELD: Final = re.compile(rb"\r\n([!#-'*+.0-9A-Z^-z|~-]+):[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)")
_CHUNK: Final = re.compile(rb"([0-9a-fA-F]{1,8})(?:[ \t]*;[^\r\n]*)?\r\n")
_OPEN_END: Final = -1  # the page ends with the connection
_CHUNKED: Final = -2


class ScrapeError(Exception):
    """One scrape brought nothing; the argument is a stable reason."""


@dataclass(frozen=True, slots=True)
class PageAddress:
    """`host` is an IP address; `tls` None: plain HTTP."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None = None

    def request(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = (
            f"GET {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/plain",
            "Accept-Encoding: identity",
        )
        return "\r\n".join(lines).encode() + _HEAD_END


class PageClient:
    """One request at a time. `busy_s` is the time spent on bytes so far."""

    def __init__(self, address: PageAddress, *, timeout_s: float, max_page_bytes: int) -> None:
        self._address = address
        self._request = address.request()
        self._timeout_s = timeout_s
        self._max_page_bytes = max_page_bytes
        self._exchange: _Exchange | None = None
        self.busy_s = 0.0

    async def get(self) -> bytes:
        """The page's body. A kept connection that has died meanwhile costs one more try.

        Raises:
            ScrapeError: connect, timeout, protocol, page_size, status_3xx and the like.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._timeout_s
        kept = self._exchange
        if kept is not None and kept.usable:
            try:
                return await self._ask(kept, ends_s - loop.time())
            except _Stale:
                pass
        return await self._ask(await self._connect(ends_s - loop.time()), ends_s - loop.time())

    def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abort()

    async def _connect(self, timeout_s: float) -> _Exchange:
        self.close()
        address = self._address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, self._exchange = await loop.create_connection(
                    lambda: _Exchange(self._max_page_bytes),
                    address.host,
                    address.port,
                    ssl=address.tls,
                    server_hostname="" if address.tls is not None else None,
                )
        except TimeoutError:
            raise ScrapeError("timeout") from None
        except ssl.SSLError:
            raise ScrapeError("tls") from None
        except OSError:
            raise ScrapeError("connect") from None
        return self._exchange

    async def _ask(self, exchange: _Exchange, timeout_s: float) -> bytes:
        timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), exchange.fail, "timeout")
        try:
            return await exchange.ask(self._request)
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
            self.busy_s += exchange.take_busy_s()


class _Stale(ScrapeError):
    """A kept connection was closed before it brought a byte."""


class _Exchange(asyncio.Protocol):
    """A connection. Collects one answer at a time."""

    def __init__(self, max_page_bytes: int) -> None:
        self._max_page_bytes = max_page_bytes
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._body_at = 0  # 0: the head is not whole yet
        self._length = 0
        self._keep = True
        self._answered = 0
        self._busy_s = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and self._keep and self._answer is None

    def take_busy_s(self) -> float:
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        assert self._answer is None
        self._answer = asyncio.get_running_loop().create_future()
        self._parts, self._size_bytes, self._body_at = [], 0, 0
        if self._transport is None:
            self.fail("connect")
        else:
            self._transport.write(request)
        return self._answer

    def fail(self, reason: str) -> None:
        stale = reason == "protocol" and self._answered and not self._size_bytes
        self._settle(error=_Stale(reason) if stale else ScrapeError(reason))
        self.abort()

    def abort(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # ---- the loop's side ---------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are not asyncio's classes

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and self._body_at and self._length == _OPEN_END and exc is None:
            self._settle(page=b"".join(self._parts)[self._body_at :])
        self.fail("protocol")

    def data_received(self, data: bytes) -> None:
        started_s = time.thread_time()
        self._parts.append(data)
        self._size_bytes += len(data)
        if self._answer is None:  # nobody asked
            self.abort()
        elif self._size_bytes > self._max_page_bytes + MAX_HEAD_BYTES:
            self.fail("page_size")
        elif self._body_at or self._read_head():
            self._look_for_end(data)
        self._busy_s += time.thread_time() - started_s

    def _read_head(self) -> bool:
        """Whether the head is whole and good."""
        whole = b"".join(self._parts)
        self._parts = [whole]
        end = whole.find(_HEAD_END, 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(whole) > MAX_HEAD_BYTES:
                self.fail("protocol")
            return False
        status = _STATUS.match(whole)
        if status is None:
            self.fail("protocol")
            return False
        if status[2] != b"200":
            self.fail(f"status_{chr(status[2][0])}xx")
            return False
        self._body_at = end + len(_HEAD_END)
        fields = {name.lower(): value.lower() for name, value in _FIELD.findall(whole, 0, end + 2)}
        self._keep = status[1] == b"1" and fields.get(b"connection") != b"close"
        self._length = self._framing(fields)
        return True

    def _framing(self, fields: dict[bytes, bytes]) -> int:
        if b"transfer-encoding" in fields:
            return _CHUNKED
        length = fields.get(b"content-length")
        if length is None:
            self._keep = False
            return _OPEN_END
        return int(length) if length.isdigit() and len(length) < 12 else 0

    def _look_for_end(self, latest: bytes) -> None:
        if self._length == _OPEN_END:
            return
        if self._length == _CHUNKED:
            tail = latest[-5:] if len(latest) >= 5 else b"".join(self._parts)[-5:]
            if tail == b"0\r\n\r\n":
                self._unchunk()
            return
        if self._length > self._max_page_bytes:
            self.fail("page_size")
        elif self._size_bytes >= self._body_at + self._length:
            self._keep = self._keep and self._size_bytes == self._body_at + self._length
            self._settle(page=b"".join(self._parts)[self._body_at : self._body_at + self._length])

    def _unchunk(self) -> None:
        """Take the chunks apart if the last one is really there (what ends like it may be data)."""
        whole, at = b"".join(self._parts), self._body_at
        page: list[bytes] = []
        self._parts = [whole]
        while (chunk := _CHUNK.match(whole, at)) is not None:
            size, start = int(chunk[1], 16), chunk.end()
            if not size:
                self._settle(page=b"".join(page))
                return
            if whole[start + size : start + size + 2] != b"\r\n":
                break
            page.append(whole[start : start + size])
            at = start + size + 2
        else:
            if _CHUNK.match(whole, at) is None and len(whole) - at > 16:
                self.fail("protocol")

    def _settle(self, *, page: bytes = b"", error: ScrapeError | None = None) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            self._answered += 1
            answer.set_result(page)
