"""The transport's thread in the engine: pulls and serves while the scheduler thread is in a step.

The scheduler thread hands over requests and collects what has ended (`take_finished`); neither waits for the
other. The thread starts with the tier and outlives every pull; the transport starts once the engine has
chosen its block hashes, because peers compare them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from engine_plugin.identity import Address, PeerIdentity, format_address
from engine_plugin.transport import (
    MoverDown,
    Offer,
    PeerTransport,
    PrefetchOrder,
    PrefetchResult,
    PullError,
    TierMemory,
    TransportStats,
)
from engine_plugin.transport.peer_keys import follow
from engine_plugin.vllm.finished import Answered, Finished, Moved, ServiceCounts, Usable
from engine_plugin.vllm.ordered_pulls import OrderedPull, serve_order
from engine_plugin.vllm.pull_reports import PullReports
from engine_plugin.vllm.request_pull import RequestPull
from engine_plugin.vllm.supplies import Supplies
from engine_plugin.vllm.tier_config import TierConfig
from engine_plugin.vllm.tier_index import TierIndex
from engine_plugin.vllm.tier_store import TierStore

log = logging.getLogger("vllm.kvpull")

IDENTITY_POLL_S: Final = 0.05
RETRY_START_S: Final = 5.0
FIGURES_S: Final = 1.0
SHORTEST_FETCH_S: Final = 0.1
CLOSE_S: Final = 10.0


class PullService:
    """One rank's transport on its own thread.

    Attributes:
        address: what peers dial, with the real port once up.
        reports_port: of the PullFinished publisher; 0 before it is up.
        up: pulls can be made and served.
        failed: they never will be; the log says why.
    """

    def __init__(
        self,
        *,
        config: TierConfig,
        listen: Address,
        reports_port: int,
        index: TierIndex,
        tier: TierMemory,
        find_identity: Callable[[], PeerIdentity | None],
        block_tokens: int,
        on_figures: Callable[[], None],
    ) -> None:
        """Start the thread. `find_identity` is asked until it knows. `on_figures` is called on the thread
        when there are new figures to tell and no request of ours that would tell them."""
        self.address = listen
        self.reports_port = reports_port
        self.up = threading.Event()
        self.failed = threading.Event()
        self.counts = ServiceCounts()
        self.identity: PeerIdentity | None = None
        self._config = config
        self._index = index
        self._tier = tier
        self._find_identity = find_identity
        self._block_tokens = block_tokens
        self._on_figures = on_figures
        self._keys = config.read_peer_keys()
        self._finished: deque[Finished] = deque()
        self._transport: PeerTransport | None = None
        self._reports = PullReports(self.counts, block_tokens)
        self._loop = asyncio.new_event_loop()
        self._supplies = Supplies(index, config.supply_keep_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kvpull-transport", daemon=True)
        self._thread.start()

    # --- the scheduler thread -------------------------------------------------------------------
    @property
    def stats(self) -> TransportStats | None:
        """The transport's counters; None before it exists."""
        return self._transport.stats if self._transport is not None else None

    @property
    def quarantined_slots(self) -> int:
        """Slots that a peer may still write into."""
        stats = self.stats
        return stats.quarantined_slots if stats is not None else 0

    @property
    def key_ids(self) -> tuple[str, ...]:
        """As `PeerTransport.key_ids`."""
        return self._transport.key_ids if self._transport is not None else ()

    def ask(self, pull: RequestPull, keys: tuple[bytes, ...]) -> None:
        """Ask the source; ends with `Answered`."""
        self._submit(self._ask(pull, keys))

    def fetch(self, job_id: int, pull: RequestPull, offer: Offer, slots: Sequence[int]) -> None:
        """Move the offer's first blocks into `slots`; ends with `Moved`."""
        self._submit(self._fetch(job_id, pull, offer, tuple(slots)))

    def abandon(self, offer: Offer) -> None:
        """Give an offer back unfetched."""
        self._call(self._abandon, offer)

    def expect_supply(self, kv_request_id: str) -> None:
        """A prefill leg has begun."""
        self._call(self._supplies.expect, kv_request_id)

    def supply_ready(self, kv_request_id: str) -> None:
        """A prefill leg is over, and what it stored is pinned."""
        self._call(self._supplies.ready, kv_request_id)

    def report(self, pull: RequestPull) -> None:
        """Tell whoever listens what came of a pull. A P/D hand-over is none."""
        if not pull.source.handed_over:
            self._call(self._reports.report, pull, time.monotonic())

    def take_finished(self) -> list[Finished]:
        """What has ended since the last call."""
        taken = []
        while self._finished:
            taken.append(self._finished.popleft())
        return taken

    def has_finished(self) -> bool:
        """Whether `take_finished` would return anything."""
        return bool(self._finished)

    def end_order(self, pull: OrderedPull, result: PrefetchResult) -> None:
        """Nothing more comes of this order."""
        self._call(self._end_order, pull, result)

    def close(self) -> None:
        """End every pull, the transport and its mover; at most some seconds. Idempotent."""
        if self._thread.is_alive():
            self._call(self._closing.set)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("the transport's thread did not end within %.0f s", CLOSE_S)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _submit(self, work: Coroutine[Any, Any, None]) -> None:
        if self._loop.is_closed():
            work.close()
        else:
            self._loop.call_soon_threadsafe(self._start, work)

    # --- the service's own thread ---------------------------------------------------------------
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception:
            log.exception("kvpull's transport has failed; this engine neither pulls nor serves")
            self.failed.set()
        finally:
            self.up.clear()
            self._loop.close()

    async def _main(self) -> None:
        starting = asyncio.create_task(self._bring_up())
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({starting, closing}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            await closing
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._take_down()

    async def _bring_up(self) -> None:
        identity = self._find_identity()
        while identity is None:  # vLLM tells nobody
            await asyncio.sleep(IDENTITY_POLL_S)
            identity = self._find_identity()
        self.identity = identity
        self.reports_port = self._reports.bind(self.address[0], self.reports_port)
        while not await self._start_transport(identity):  # noqa: ASYNC110 - nothing tells when a port is free
            await asyncio.sleep(RETRY_START_S)
        self.up.set()
        log.info("kvpull listens on %s as %s", format_address(self.address), identity.instance)
        assert self._transport is not None
        self._transport.keep_connected(self._config.connect_addresses())
        if self._keys:
            self._start(follow(Path(self._config.peer_key_file), self._keys, self._transport))
        self._start(self._watch_figures())

    async def _start_transport(self, identity: PeerIdentity) -> bool:
        transport = PeerTransport(
            listen=self.address,
            identity=identity,
            tier=self._tier,
            store=TierStore(self._index, self._supplies, self._usable),
            keys=self._keys,
            insecure=self._config.insecure,
            limits=self._config.limits(),
            faults=self._config.make_faults(),
            prefetcher=None if self._config.insecure else self._prefetch,  # strangers name nobody we dial
        )
        try:
            await transport.start()
        except (OSError, MoverDown) as error:
            log.error("kvpull cannot start on %s, trying again: %s", format_address(self.address), error)
            return False
        self.address = transport.address
        self._transport = transport
        return True

    async def _take_down(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self._supplies.close()
        if self._transport is not None:
            await self._transport.stop()
        self._reports.close()

    async def _watch_figures(self) -> None:
        """What peers do here is told within a second, also while the engine is idle."""
        told: object = None
        while True:
            stats = self.stats
            now = (
                None
                if stats is None
                else (stats.served_blocks, stats.refused.total(), stats.handshakes_unfinished),
                self.quarantined_slots,
                self._index.leases,
                self.counts.orders.total(),
                self.key_ids,
            )
            if now != told:
                told = now
                self._on_figures()
            await asyncio.sleep(FIGURES_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, pull: RequestPull, keys: tuple[bytes, ...]) -> None:
        offer, reason = None, "starting"
        try:
            if self._transport is not None:
                offer = await self._look_up(self._transport, pull, keys)
                reason = ""
        except PullError as error:
            reason = error.reason.value
        except asyncio.CancelledError:
            reason = "aborted"
            raise
        except Exception:  # a pull never makes a request fail, not even by a fault of our own
            log.exception("look-up of pull %s", pull.source.kv_request_id)
            reason = "internal"
        finally:
            self._finished.append(Answered(pull, offer, reason))

    async def _look_up(self, transport: PeerTransport, pull: RequestPull, keys: tuple[bytes, ...]) -> Offer:
        source = pull.source
        wait_s = self._config.supply_wait_s if source.handed_over else 0.0
        return await transport.lookup(
            source.address,
            source.kv_request_id,
            keys,
            deadline_s=self._config.max_extra_ttft_s + wait_s,
            wait_s=wait_s,
        )

    async def _fetch(self, job_id: int, pull: RequestPull, offer: Offer, slots: tuple[int, ...]) -> None:
        started_s = time.monotonic()
        blocks, received_bytes, reason = 0, 0, "internal"
        quarantined = frozenset(slots)  # unless we learn better
        try:
            assert self._transport is not None
            deadline_s = self._config.deadline_s(len(slots) * self._block_tokens)
            if not pull.source.handed_over:
                deadline_s -= started_s - pull.started_s
            fetched = await self._transport.fetch(offer, slots, deadline_s=max(SHORTEST_FETCH_S, deadline_s))
            blocks, received_bytes = fetched.blocks, fetched.received_bytes
            reason = fetched.shortfall.value if fetched.shortfall else "ok"
            quarantined = frozenset()
        except PullError as error:
            reason, quarantined = error.reason.value, frozenset(error.quarantined)
        except asyncio.CancelledError:
            reason = "aborted"
            raise
        except Exception:
            log.exception("fetch of pull %s", pull.source.kv_request_id)
        finally:
            took_s = time.monotonic() - started_s
            self._finished.append(Moved(job_id, pull, blocks, received_bytes, reason, quarantined, took_s))
            if isinstance(pull, OrderedPull):
                self._on_figures()  # no request of ours keeps the engine stepping

    async def _prefetch(self, order: PrefetchOrder) -> PrefetchResult:
        assert self._transport is not None

        def hand_over(pull: OrderedPull) -> None:
            self._finished.append(pull)
            self._on_figures()

        result = await serve_order(order, self._transport.lookup, self._index, hand_over)
        self.counts.orders[result.reason] += 1
        return result

    @staticmethod
    def _end_order(pull: OrderedPull, result: PrefetchResult) -> None:
        if not pull.ended.done():
            pull.ended.set_result(result)

    def _abandon(self, offer: Offer) -> None:
        if self._transport is not None:
            self._transport.abandon(offer)

    def _usable(self, slots: Sequence[int]) -> None:
        self._finished.append(Usable(tuple(slots)))
