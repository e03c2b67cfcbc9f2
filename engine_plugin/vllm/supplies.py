"""P/D hand-over at the prefill leg: blocks pinned under a `kv_request_id` until the decode leg has them.

On the transport's loop. A look-up that comes before the prefill leg is done waits for it; one that comes
after it failed or expired does not.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from engine_plugin.vllm.tier_index import TierIndex

MAX_REMEMBERED_IDS: Final = 4096
_PREFIX: Final = "supply-"  # of lease ids in the index; the transport's own are hex


class Supplies:
    """The supplies of one engine."""

    def __init__(self, index: TierIndex, keep_s: float) -> None:
        self._index = index
        self._keep_s = keep_s
        self._settled: OrderedDict[str, None] = OrderedDict()  # ready, taken or never to come
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._expiry: dict[str, asyncio.TimerHandle] = {}

    @staticmethod
    def lease_id(kv_request_id: str) -> str:
        """Under which the prefill leg's blocks are pinned in the index, as they are stored."""
        return _PREFIX + kv_request_id

    def expect(self, kv_request_id: str) -> None:
        """A prefill leg has begun, whatever an earlier try came to."""
        self._settled.pop(kv_request_id, None)
        self._keep(kv_request_id)

    def ready(self, kv_request_id: str) -> None:
        """The prefill leg is over; what it stored is pinned."""
        self._keep(kv_request_id)
        self._settle(kv_request_id)

    def end(self, kv_request_id: str) -> None:
        """Fetched or expired: unpin; idempotent."""
        expiry = self._expiry.pop(kv_request_id, None)
        if expiry is not None:
            expiry.cancel()
        self._index.release(self.lease_id(kv_request_id))
        self._settle(kv_request_id)

    async def wait(self, kv_request_id: str, wait_s: float) -> None:
        """Until the supply is settled, at most `wait_s`."""
        if wait_s <= 0 or kv_request_id in self._settled:
            return
        settled = asyncio.Event()
        waiting = self._waiting.setdefault(kv_request_id, set())
        waiting.add(settled)
        try:
            async with asyncio.timeout(wait_s):
                await settled.wait()
        except TimeoutError:
            return
        finally:
            waiting.discard(settled)
            if not waiting:
                self._waiting.pop(kv_request_id, None)

    def close(self) -> None:
        """End every supply and wait."""
        for kv_request_id in {*self._expiry, *self._waiting}:
            self.end(kv_request_id)

    def _keep(self, kv_request_id: str) -> None:
        if (old := self._expiry.pop(kv_request_id, None)) is not None:
            old.cancel()
        loop = asyncio.get_running_loop()
        self._expiry[kv_request_id] = loop.call_later(self._keep_s, self.end, kv_request_id)

    def _settle(self, kv_request_id: str) -> None:
        self._settled[kv_request_id] = None
        while len(self._settled) > MAX_REMEMBERED_IDS:
            self._settled.popitem(last=False)
        for settled in self._waiting.get(kv_request_id, ()):
            settled.set()
