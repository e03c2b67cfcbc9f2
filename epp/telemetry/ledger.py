"""Moves records out of the core as they are settled and finished: to the metrics, and to the ledger file.

Half a second behind; everything in between waits in the core's bounded queues. Writing happens in a
thread, one batch at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from epp.core.endpoint_picker import EndpointPicker
from epp.telemetry.ledger_file import LedgerFile
from epp.telemetry.pull_metrics import PullMetrics

log = logging.getLogger(__name__)

INTERVAL_S = 0.5


class DecisionLedger:
    """Component: `run` until cancelled, then `aclose` writes what is finished."""

    def __init__(
        self,
        picker: EndpointPicker,
        metrics: PullMetrics,
        registry: CollectorRegistry,
        file: LedgerFile | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._picker = picker
        self._metrics = metrics
        self._file = file
        self._clock = clock
        self._unix_clock = unix_clock
        self._counted = {"written": 0, "dropped": 0}
        self._records = Counter(
            "kvpull_epp_ledger_records", "Records for the ledger file.", ["result"], registry=registry
        )

    async def run(self) -> None:
        while True:
            try:
                await self.pump()
            except Exception:  # task guard: the ledger must not end the picker
                log.exception("the decision ledger met a fault of the picker; records are lost")
            await asyncio.sleep(INTERVAL_S)

    async def pump(self) -> None:
        """One round."""
        self._picker.expire(self._clock())
        for record in self._picker.records.take_settled():
            self._metrics.settled(record)
        finished = self._picker.records.take_finished()
        if self._file is None:
            return
        if finished:
            offset_s = self._unix_clock() - self._clock()
            await asyncio.shield(asyncio.to_thread(self._file.write, finished, offset_s))
        self._count("written", self._file.written)
        self._count("dropped", self._file.dropped + self._picker.records.unread)

    def _count(self, result: str, total: int) -> None:
        self._records.labels(result).inc(total - self._counted[result])
        self._counted[result] = total

    async def aclose(self) -> None:
        """Write what is finished; what is still open is lost."""
        await self.pump()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
