"""Serving "pull these blocks now": an order of a peer, with no request attached, within a rate.

The transport knows only how to ask and how to limit; what it means is the engine's `Prefetcher`. Orders come
over sessions that have proved to hold the pool's key, like everything else.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from engine_plugin.protocol import Declined, Prefetch, Prefetched
from engine_plugin.transport.control.turns import TokenBucket
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.types import Prefetcher, PrefetchOrder

ANSWER_S: Final = 1.0  # an engine may take so much longer than the order's deadline

log = logging.getLogger(__name__)


class PrefetchDesk:
    """All orders of all peers: no more than `prefetches` at a time, no more blocks than the rate."""

    def __init__(
        self, prefetcher: Prefetcher | None, limits: Limits, now_s: float, block_size_tokens: int
    ) -> None:
        self._prefetcher = prefetcher
        self._block_size_tokens = block_size_tokens
        self._limits = limits
        self._blocks = TokenBucket(limits.prefetch_blocks_per_s, limits.prefetch_burst_blocks, now_s)
        self._running = 0

    def refusal(self, order: Prefetch) -> Declined | None:
        """Why this order is not taken. If it is, the rate has paid for it: call `run`."""
        if self._prefetcher is None:
            return Declined(order.id, "unsupported", "this engine takes no prefetch orders")
        if self._running >= self._limits.prefetches:
            return Declined(order.id, "limit", "prefetches")
        blocks = len(order.hashes) or len(order.tokens) // self._block_size_tokens
        if not self._blocks.take(max(1, blocks), asyncio.get_running_loop().time()):
            return Declined(order.id, "limit", "prefetch_blocks_per_s")
        self._running += 1
        return None

    async def run(self, order: Prefetch) -> Prefetched | Declined:
        """Have the engine pull; ends by the order's deadline or the limits', whichever is sooner."""
        assert self._prefetcher is not None
        deadline_s = min(order.deadline_ms / 1000, self._limits.prefetch_s)
        source = (order.source_host, order.source_port)
        wanted = PrefetchOrder(
            source,
            order.kv_request_id,
            tuple(order.hashes),
            deadline_s,
            order.tokens,
            order.cache_salt,
            order.lora_name,
        )
        try:
            async with asyncio.timeout(deadline_s + ANSWER_S):
                result = await self._prefetcher(wanted)
        except TimeoutError:
            return Declined(order.id, "timeout", "the engine did not finish")
        except Exception:
            log.exception("prefetch %s", order.kv_request_id)
            return Declined(order.id, "failed", "the engine's own fault")
        finally:
            self._running -= 1
        return Prefetched(order.id, result.blocks, result.received_bytes, result.reason[:256])
