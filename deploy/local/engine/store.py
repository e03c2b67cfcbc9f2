"""The CPU tier as peers see it: leases on blocks, and supplies announced for a P/D hand-off.

Implements the transport's `BlockStore`. A lease pins blocks until the transport releases it; a
supply pins a prompt's blocks until they were fetched or `keep_s` is over. It must not copy bytes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_plugin.transport import Lease
from epp.engine_model.cache import TierPool

_REMEMBERED_IDS = 4096


@dataclass(slots=True)
class _Supply:
    slots: tuple[int, ...]
    expiry: asyncio.TimerHandle


class CpuStore:
    """All methods run on the engine's loop."""

    def __init__(
        self, pool: TierPool, *, supply_keep_s: float, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._pool = pool
        self._keep_s = supply_keep_s
        self._on_change = on_change  # slots have come free: somebody may be waiting for them
        self._leases: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._supplies: dict[str, _Supply] = {}
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()  # supplies that will not come (again)

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def supplies(self) -> int:
        return len(self._supplies)

    # --- BlockStore, called by the transport ----------------------------------------------------
    async def lease(self, hashes: Sequence[bytes], kv_request_id: str, wait_s: float) -> Lease | None:
        """Pin the longest contiguous prefix of `hashes` held; None: nothing. See `BlockStore`."""
        if wait_s > 0 and not self._is_settled(kv_request_id):
            await self._supply(kv_request_id, wait_s)
        slots = self._pool.prefix(hashes)
        if not slots:
            return None
        self._pool.pin(slots)
        lease_id = uuid.uuid4().hex
        self._leases[lease_id] = (kv_request_id, slots)
        generations = tuple(self._pool.generation(slot) for slot in slots)
        return Lease(lease_id, slots, generations, still_valid=lambda: lease_id in self._leases)

    def release(self, lease_id: str) -> None:
        """Unpin a lease, and the supply it was for; idempotent."""
        held = self._leases.pop(lease_id, None)
        if held is None:
            return
        kv_request_id, slots = held
        self._pool.unpin(slots)
        self.withdraw(kv_request_id)
        self._on_change()

    def slots_usable(self, slots: Sequence[int]) -> None:
        """No peer can write into these any more."""
        self._pool.usable(slots)
        self._on_change()

    # --- the engine's own side ------------------------------------------------------------------
    def announce(self, kv_request_id: str, slots: tuple[int, ...]) -> None:
        """These blocks are ready for the decode leg; pins them for a bounded time."""
        self.withdraw(kv_request_id)
        self._settled.pop(kv_request_id, None)
        self._pool.pin(slots)
        expiry = asyncio.get_running_loop().call_later(self._keep_s, self.withdraw, kv_request_id)
        self._supplies[kv_request_id] = _Supply(slots, expiry)
        self._wake(kv_request_id)

    def expect_supply(self, kv_request_id: str) -> None:
        """A prefill leg has begun: look-ups under its id wait for it, whatever an earlier try came to."""
        self._settled.pop(kv_request_id, None)

    def withdraw(self, kv_request_id: str) -> None:
        """End a supply: fetched, expired, or it failed before it began; idempotent."""
        supply = self._supplies.pop(kv_request_id, None)
        if supply is not None:
            supply.expiry.cancel()
            self._pool.unpin(supply.slots)
            self._settle(kv_request_id)
            self._on_change()

    def fail_supply(self, kv_request_id: str) -> None:
        """The prefill leg ended without blocks: whoever waits for them must not wait longer."""
        self.withdraw(kv_request_id)
        self._settle(kv_request_id)
        self._wake(kv_request_id)

    def close(self) -> None:
        """Drop every supply and its timer; waiting look-ups end with what is held."""
        for kv_request_id in [*self._supplies, *self._waiting]:
            self.fail_supply(kv_request_id)

    async def _supply(self, kv_request_id: str, wait_s: float) -> None:
        announced = asyncio.Event()
        self._waiting.setdefault(kv_request_id, []).append(announced)
        try:
            async with asyncio.timeout(wait_s):
                await announced.wait()
        except TimeoutError:
            pass
        finally:
            waiting = self._waiting[kv_request_id]
            waiting.remove(announced)
            if not waiting:
                del self._waiting[kv_request_id]

    def _wake(self, kv_request_id: str) -> None:
        for announced in self._waiting.get(kv_request_id, ()):
            announced.set()

    def _is_settled(self, kv_request_id: str) -> bool:
        return kv_request_id in self._supplies or kv_request_id in self._settled

    def _settle(self, kv_request_id: str) -> None:
        self._settled[kv_request_id] = None
        while len(self._settled) > _REMEMBERED_IDS:
            self._settled.popitem(last=False)
