"""Sends the orders of `epp.core.next_turn` to the engines, over their encrypted control channel.

It decides nothing: the core has, within its rates. Bounded by the core's own limit of orders in flight. A
failed order costs nothing but its count: the next turn computes or pulls as ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine_plugin.identity import Address
from engine_plugin.transport import PrefetchOrder, PullError
from engine_plugin.transport.orders import PrefetchOrders
from engine_plugin.transport.peer_keys import PeerKeys, follow
from epp.core.next_turn import NextTurns, PrefetchAsk

POLL_S: Final = 0.05  # between looks at what the core has ordered

log = logging.getLogger(__name__)


class PrefetchSender:
    """Create it on the loop it will run on."""

    def __init__(
        self, turns: Callable[[], NextTurns | None], keys: PeerKeys, key_file: Path | None = None
    ) -> None:
        """`turns`: of the configuration in force; None: it orders nothing. `key_file`: where the keys come
        from, followed while it runs. Raises ValueError: no key, or one that is too short."""
        self._turns = turns
        self._keys = keys
        self._key_file = key_file
        self._orders = PrefetchOrders(keys)
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended: Counter[str] = Counter()  # by reason: `ok`, or why it brought less
        self.received_bytes = 0
        self.blocks = 0

    @property
    def skipped(self) -> Counter[str]:
        """Why turns ended without an order."""
        turns = self._turns()
        return turns.skipped if turns is not None else Counter()

    async def run(self) -> None:
        """Until cancelled; then every order is given up."""
        following = None
        if self._key_file is not None:
            following = asyncio.create_task(follow(self._key_file, self._keys, self._orders))
        try:
            while True:
                turns = self._turns()
                for ask in turns.take() if turns is not None else ():
                    assert turns is not None
                    task = asyncio.create_task(self._order(turns, ask), name="prefetch-order")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._tasks:
                task.cancel()
            if following is not None:
                following.cancel()
                self._tasks.add(following)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._orders.stop()

    async def _order(self, turns: NextTurns, ask: PrefetchAsk) -> None:
        try:
            order = PrefetchOrder(
                _address(ask.source_address),
                ask.order_id,
                (),
                turns.settings.deadline_s,
                ask.token_ids,
                ask.cache_salt or "",
                ask.lora_name or "",
            )
            result = await self._orders.order(_address(ask.target_address), order)
        except PullError as error:
            self.ended[error.reason.value] += 1
            log.info("order %s to %s: %s", ask.order_id, ask.target, error.reason.value)
        except ValueError:  # an address that is none
            self.ended["no_address"] += 1
        else:
            self.ended[result.reason] += 1
            self.blocks += result.blocks
            self.received_bytes += result.received_bytes
            log.info(
                "order %s: %s holds %d blocks, %d bytes from %s: %s",
                ask.order_id,
                ask.target,
                result.blocks,
                result.received_bytes,
                ask.source,
                result.reason,
            )
        finally:
            turns.finished(ask.order_id)


def _address(text: str) -> Address:
    """Raises ValueError: it is no `host:port`."""
    host, _, port = text.rpartition(":")
    if not host:
        raise ValueError(text)
    return host.strip("[]"), int(port)
