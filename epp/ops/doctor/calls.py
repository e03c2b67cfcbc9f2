"""HTTP and TCP with a deadline: every call ends, and every fault is a text without a body in it.

No proxy of the environment, no redirect is followed: a token goes to the URL given and nowhere else.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

MAX_ANSWER_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, or the `fault` that kept it away. `clock_offset_s`: the server's Date against our clock,
    good to a second."""

    status: int = 0
    text: str = ""
    fault: str | None = None
    clock_offset_s: float | None = None
    timed_out: bool = False  # it was asked, and said nothing in time

    @property
    def good(self) -> bool:
        return self.fault is None and self.status == 200

    @property
    def why(self) -> str:
        """In a few words, never what the server wrote."""
        return self.fault or f"status {self.status}"

    def json(self) -> Any:
        """None where it is no JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class Caller:
    """Calls with one time-out each, at most `at_once` at a time."""

    def __init__(self, session: aiohttp.ClientSession, *, timeout_s: float, at_once: int = 16) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(at_once)

    async def get(self, url: str, headers: Mapping[str, str] | None = None, *, verify: bool = True) -> Reply:
        return await self._call("GET", url, None, headers, self._timeout_s, verify=verify)

    async def post(
        self,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        return await self._call("POST", url, body, headers, timeout_s or self._timeout_s)

    async def _call(
        self,
        method: str,
        url: str,
        body: Any,
        headers: Mapping[str, str] | None,
        timeout_s: float,
        *,
        verify: bool = True,
    ) -> Reply:
        async with self._room:
            asked_s = time.time()
            try:
                async with (
                    asyncio.timeout(timeout_s),
                    self._session.request(
                        method, url, json=body, headers=headers, allow_redirects=False, ssl=verify
                    ) as answer,
                ):
                    raw = await answer.content.read(MAX_ANSWER_BYTES)
                    while not answer.content.at_eof() and len(raw) < MAX_ANSWER_BYTES:
                        raw += await answer.content.read(MAX_ANSWER_BYTES - len(raw))
            except TimeoutError:
                return Reply(fault=f"no answer within {timeout_s:g} s", timed_out=True)
            except (aiohttp.ClientError, ValueError, OSError) as error:
                return Reply(fault=_reason(error))
            offset_s = _offset_s(answer.headers.get("Date"), asked_s, time.time())
            return Reply(answer.status, raw.decode("utf-8", "replace"), None, offset_s)

    async def knock(self, host: str, port: int) -> str | None:
        """Why no TCP connection came about; None: one did."""
        async with self._room:
            try:
                async with asyncio.timeout(self._timeout_s):
                    _, writer = await asyncio.open_connection(host, port)
            except TimeoutError:
                return f"no connection within {self._timeout_s:g} s"
            except OSError as error:
                return _reason(error)
            writer.close()
            return None


def _reason(error: Exception) -> str:
    number = getattr(getattr(error, "os_error", error), "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else type(error).__name__


def _offset_s(date: str | None, asked_s: float, answered_s: float) -> float | None:
    """Server's clock minus ours; the Date header counts whole seconds, so half a second is added."""
    try:
        server_s = email.utils.parsedate_to_datetime(date or "").timestamp() + 0.5
    except (TypeError, ValueError):
        return None
    if asked_s - 0.5 <= server_s <= answered_s + 0.5:
        return 0.0
    return server_s - (asked_s + answered_s) / 2
