"""What came of each pull, counted and told to who listens on the reports port. On the service's thread."""

from __future__ import annotations

from engine_plugin.identity import format_address
from engine_plugin.pull_report import PullFinished
from engine_plugin.report_publisher import ReportPublisher
from engine_plugin.vllm.finished import ServiceCounts
from engine_plugin.vllm.request_pull import RequestPull


class PullReports:
    """Publishes `PullFinished`: what the consumer really received, whatever was promised."""

    def __init__(self, counts: ServiceCounts, block_tokens: int) -> None:
        self._counts = counts
        self._block_tokens = block_tokens
        self._publisher = ReportPublisher()

    def bind(self, host: str, port: int) -> int:
        """As `ReportPublisher.bind`."""
        return self._publisher.bind(host, port)

    def close(self) -> None:
        """No more reports."""
        self._publisher.close()

    def report(self, pull: RequestPull, ended_s: float) -> None:
        """One pull is over; `ended_s` on the clock of its `started_s`."""
        outcome = pull.outcome
        received_tokens = outcome.received_blocks * self._block_tokens
        self._counts.reports[outcome.reason] += 1
        self._counts.received_tokens += received_tokens
        self._publisher.publish(
            PullFinished(
                id=pull.source.kv_request_id,
                source=format_address(pull.source.address),
                asked_tokens=len(pull.keys) * self._block_tokens,
                received_tokens=received_tokens,
                received_bytes=outcome.received_bytes,
                reason=outcome.reason,
                ms=max(0.0, ended_s - pull.started_s) * 1e3,
            )
        )
