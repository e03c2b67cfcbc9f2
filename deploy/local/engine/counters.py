"""What the engine counts of itself; the metrics page reads it. Values only, one writer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# upper bounds of the time-to-first-token histogram, as vLLM has them
TTFT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)


@dataclass(slots=True)
class EngineCounters:
    """Tokens unless said otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0  # in the device tier
    external_queries: int = 0
    external_hits: int = 0  # restored or received from a peer
    cached_by_source: Counter[str] = field(default_factory=Counter)  # device, host, p2p
    computed_prompt: int = 0
    generation: int = 0
    corrupt_blocks: int = 0  # restored blocks whose bytes were wrong
    offload_skipped_blocks: int = 0  # no slot in the CPU tier
    finished_requests: Counter[str] = field(default_factory=Counter)  # by finish reason
    ttft_buckets: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BUCKETS_S) + 1))
    ttft_sum_s: float = 0.0

    def observe_ttft(self, seconds: float) -> None:
        """Count one first token."""
        self.ttft_sum_s += seconds
        index = next((i for i, bound in enumerate(TTFT_BUCKETS_S) if seconds <= bound), len(TTFT_BUCKETS_S))
        self.ttft_buckets[index] += 1
