"""Ordering pulls from outside the pool of engines: what a picker needs of the control channel, and no more.

It holds the pool's peer key, has no tier and no mover, and names nothing but tokens: the engine that pulls
names its own blocks. It must not be given to anything that does not schedule: whoever holds the key is
trusted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from engine_plugin.identity import Address, PeerIdentity, format_address
from engine_plugin.protocol import Declined
from engine_plugin.transport.control.calling import Caller
from engine_plugin.transport.control.dialer import Dialer
from engine_plugin.transport.control.outbound import OutboundSession
from engine_plugin.transport.control.pool_tls import PoolKeys
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.stats import TransportStats
from engine_plugin.transport.types import PrefetchOrder, PrefetchResult, PullError, PullReason


class PrefetchOrders:
    """Sessions to the engines that are ordered; dialled on demand, with the transport's own back-off."""

    def __init__(self, keys: Sequence[bytes], limits: Limits | None = None) -> None:
        """Create it on the loop it will run on. `keys`: the first is shown, each accepted. Raises ValueError
        for none, or one that is too short."""
        limits = limits or Limits()
        self._keys = PoolKeys(keys)
        caller = Caller(_picker_identity(), self._keys, limits, TransportStats(), role="picker")

        async def connect(target: Address) -> OutboundSession:
            return await OutboundSession.connect(target, caller)

        self._dialer = Dialer(connect, limits, lambda _: None)

    async def order(self, target: Address, order: PrefetchOrder) -> PrefetchResult:
        """Have the engine at `target` pull; returns when it has, or by the order's deadline.

        Raises:
            PullError: UNREACHABLE, TIMEOUT, DISCONNECTED, REFUSED_*; REFUSED_LIMIT also where the engine
                takes no more orders now, PROTOCOL where it takes none at all.
        """
        try:
            async with asyncio.timeout(order.deadline_s):
                ended = await (await self._dialer.session(target)).prefetch(order)
        except TimeoutError as exc:
            raise PullError(PullReason.TIMEOUT, format_address(target)) from exc
        if isinstance(ended, Declined):
            limited = ended.reason == "limit"
            raise PullError(PullReason.REFUSED_LIMIT if limited else PullReason.PROTOCOL, ended.detail)
        return PrefetchResult(ended.blocks, ended.bytes, ended.reason)

    async def use_keys(self, keys: Sequence[bytes]) -> None:
        """As `PeerTransport.use_keys`."""
        await self._keys.replace(keys)
        self._dialer.keys_changed(self._keys)

    async def stop(self) -> None:
        """End every session."""
        await self._dialer.stop()


def _picker_identity() -> PeerIdentity:
    return PeerIdentity(uuid.uuid4().hex, 0, "", "", 0, 0, "", "", 0, "", "")
