"""vLLM's CPU tier as the transport's `BlockStore`, answered without the scheduler thread."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from engine_plugin.transport import Lease
from engine_plugin.vllm.supplies import Supplies
from engine_plugin.vllm.tier_index import TierIndex


class TierStore:
    """Every method on the transport's loop. `on_usable` is told of slots that left quarantine."""

    def __init__(
        self, index: TierIndex, supplies: Supplies, on_usable: Callable[[Sequence[int]], None]
    ) -> None:
        self._index = index
        self._supplies = supplies
        self._on_usable = on_usable
        self._supply_of: dict[str, str] = {}  # lease -> the supply it empties

    async def lease(self, hashes: Sequence[bytes], kv_request_id: str, wait_s: float) -> Lease | None:
        """See `BlockStore`."""
        await self._supplies.wait(kv_request_id, wait_s)
        lease_id = uuid.uuid4().hex
        held = self._index.lease(lease_id, hashes)
        if not held:
            return None
        if wait_s > 0:
            self._supply_of[lease_id] = kv_request_id
        return Lease(
            lease_id,
            tuple(block.slot for block in held),
            tuple(block.generation for block in held),
            still_valid=lambda: self._index.holds_lease(lease_id),
        )

    def release(self, lease_id: str) -> None:
        """See `BlockStore`."""
        self._index.release(lease_id)
        supply = self._supply_of.pop(lease_id, None)
        if supply is not None:
            self._supplies.end(supply)

    def slots_usable(self, slots: Sequence[int]) -> None:
        """See `BlockStore`."""
        self._on_usable(slots)
