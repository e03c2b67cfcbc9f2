"""Sends ended spans to a collector, in batches, from the event loop. A collector that is slow or gone costs
spans (counted), never requests or memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Final

import aiohttp

from sidecar.tracing.otlp import encode_spans
from sidecar.tracing.settings import TracingSettings
from sidecar.tracing.spans import Span, Tracer

_log = logging.getLogger(__name__)

MAX_QUEUED: Final = 8_192
BATCH: Final = 512
INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 5.0


class SpanExporter:
    """`run` sends until it is cancelled; then what is left is tried once."""

    def __init__(self, settings: TracingSettings, *, interval_s: float | None = None) -> None:
        self._settings = settings
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._queue: deque[Span] = deque()
        self._failing = False
        self.sent = 0
        self.dropped = 0

    def tracer(self) -> Tracer:
        """Whose spans come here."""
        return Tracer(self.add, ratio=self._settings.ratio)

    def add(self, span: Span) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append(span)

    async def run(self) -> None:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), headers=dict(self._settings.headers)
        ) as session:
            try:
                while True:
                    await asyncio.sleep(self._interval_s)
                    await self._flush(session)
            finally:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(self._flush(session))

    async def _flush(self, session: aiohttp.ClientSession) -> None:
        """Everything that is there; gives up at the first failure, the rest waits for the next turn."""
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            sent = False
            try:
                sent = await self._send(session, batch)
            finally:  # a cancel, too
                self.sent += len(batch) * sent
                self.dropped += len(batch) * (not sent)
            if not sent:
                return

    async def _send(self, session: aiohttp.ClientSession, batch: list[Span]) -> bool:
        body = encode_spans(batch, self._settings.resource)
        headers = {"Content-Type": "application/json"}
        fault = ""
        try:
            async with session.post(
                self._settings.url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                if answer.status >= 300:
                    fault = f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = type(error).__name__
        if fault and not self._failing:
            _log.warning("spans cannot be sent to the collector: %s", fault)
        self._failing = bool(fault)
        return not fault
