"""The transport as the engine sees it: look up blocks at a peer, move them here, serve our own.

One asyncio loop; every method is called on it and none blocks it. The parts: `consumer` (our pulls) over
`dialer` and `outbound` sessions, `inbound` listener and `serving` (peers' pulls), one `mover_supervisor`
for both, and `quarantine` between a pull that was given up and the reuse of its slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine_plugin.identity import Address, PeerIdentity
from engine_plugin.transport.checksums import Checksums
from engine_plugin.transport.consumer import Consumer
from engine_plugin.transport.control.calling import Caller
from engine_plugin.transport.control.dialer import Dialer
from engine_plugin.transport.control.inbound import Listener
from engine_plugin.transport.control.keeper import Keeper
from engine_plugin.transport.control.leases import LeaseBook
from engine_plugin.transport.control.outbound import OutboundSession
from engine_plugin.transport.control.pool_tls import PoolKeys
from engine_plugin.transport.control.prefetching import PrefetchDesk
from engine_plugin.transport.control.producer import Producer, leasing_turns, moving_turns
from engine_plugin.transport.faults import Faults
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.mover.supervisor import MoverSupervisor
from engine_plugin.transport.quarantine import Quarantine
from engine_plugin.transport.stats import TransportStats
from engine_plugin.transport.tier_memory import TierMemory
from engine_plugin.transport.types import (
    BlockStore,
    Fetched,
    Offer,
    Prefetcher,
    PrefetchOrder,
    PrefetchResult,
)

log = logging.getLogger(__name__)


class PeerTransport:
    """Pulls of one engine rank, both directions.

    Attributes:
        address: where it listens; with the real port once started.
        stats: plain counters, see `TransportStats`.
    """

    def __init__(
        self,
        *,
        listen: Address,
        identity: PeerIdentity,
        tier: TierMemory,
        store: BlockStore,
        keys: Sequence[bytes] = (),
        insecure: bool = False,
        checksums: bool = True,
        limits: Limits | None = None,
        faults: Faults | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """Create it on the loop it will run on; nothing runs before `start`.

        Args:
            keys: the pool's secret, and others that are accepted while it is being replaced (`peer_keys`);
                the control channel is encrypted, and only holders of one are peers.
            insecure: without a key: plain text, any peer of equal identity is trusted.
            checksums: verify every block that arrives. Off, a late or torn write is still kept from
                reused slots by quarantine and generations, but nothing would notice if it were not.
            prefetcher: pulls what a peer orders without a request; None: such orders are declined.

        Raises:
            ValueError: the identity's block size is not the tier's slot size, a key is too short, or
                there is neither a key nor `insecure`.
        """
        if identity.block_bytes != tier.slot_bytes:
            raise ValueError(f"blocks of {identity.block_bytes} bytes in slots of {tier.slot_bytes}")
        if bool(keys) == insecure:
            raise ValueError("a transport has a peer key, or is insecure by name")
        limits = limits or Limits()
        self.address = listen
        self.stats = TransportStats()
        self._keys = PoolKeys(keys) if keys else None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kv-checksum")
        self._tasks: set[asyncio.Task[None]] = set()
        self._movers = MoverSupervisor(
            f"{identity.instance}-{identity.rank}", tier, limits, self._mover_changed
        )
        digests = Checksums(tier, self._threads, enabled=checksums)
        self._producer = self._make_producer(identity, tier, store, digests, limits, faults, prefetcher)
        self._listener = Listener(self._producer, self._keys)
        self._dialer = self._make_dialer(identity, limits)
        self._keeper = Keeper(self._dialer, limits)
        self._consumer = Consumer(
            identity=identity,
            slots=tier.slots,
            checksums=digests,
            dialer=self._dialer,
            movers=self._movers,
            quarantine=Quarantine(limits, self.stats, self._movers.retire, store.slots_usable),
            usable=store.slots_usable,
            limits=limits,
            stats=self.stats,
        )

    def _make_producer(
        self,
        identity: PeerIdentity,
        tier: TierMemory,
        store: BlockStore,
        digests: Checksums,
        limits: Limits,
        faults: Faults | None,
        prefetcher: Prefetcher | None,
    ) -> Producer:
        now_s = asyncio.get_running_loop().time()
        return Producer(
            identity=identity,
            store=store,
            checksums=digests,
            movers=self._movers,
            leases=LeaseBook(store, limits, self.stats),
            leasing=leasing_turns(limits, tier.total_bytes),
            moves=moving_turns(limits),
            prefetching=PrefetchDesk(prefetcher, limits, now_s, identity.block_size_tokens),
            limits=limits,
            stats=self.stats,
            faults=faults,
            tasks=self._tasks,
        )

    def _make_dialer(self, identity: PeerIdentity, limits: Limits) -> Dialer:
        caller = Caller(identity, self._keys, limits, self.stats, local_host=self.address[0])

        async def connect(source: Address) -> OutboundSession:
            return await OutboundSession.connect(source, caller)

        return Dialer(connect, limits, self._session_opened)

    @property
    def mover_pid(self) -> int | None:
        """Process id of the mover now in use, for fault injection and diagnosis."""
        return self._movers.current.pid if self._movers.current is not None else None

    async def start(self) -> None:
        """Start the mover and listen; returns when pulls can be made and served.

        Raises:
            MoverDown: the mover does not start.
            OSError: the address cannot be bound.
        """
        if self._keys is None:
            log.warning("insecure: any peer of equal identity is trusted, and the control channel is plain")
        await self._movers.start()
        try:
            self.address = await self._listener.start(self.address)
        except OSError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop serving, end every pull, end the mover; idempotent.

        Pulls in progress fail with `DISCONNECTED`; when this returns, `slots_usable` has named every
        quarantined slot and every lease is released.
        """
        await self._keeper.stop()
        await self._dialer.stop()
        await self._listener.stop()
        await self._movers.stop()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self._threads.shutdown(wait=False)

    async def connect(self, source: Address, *, deadline_s: float) -> None:
        """Connect ahead of need: session, handshake and the movers' wire-up (about 30 ms of a first pull).

        Raises:
            PullError: as `lookup` for a source that cannot be reached or refuses.
        """
        await self._consumer.connect(source, deadline_s)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Names of the peer keys in force, the one shown to peers first; none if insecure. Not secret."""
        return () if self._keys is None else self._keys.ids()

    async def use_keys(self, keys: Sequence[bytes]) -> None:
        """From now on show the first of these keys to peers and accept each; sessions that rest on another
        one end, with the pulls in them. Raises ValueError: insecure, no key, or one that is too short."""
        if self._keys is None:
            raise ValueError("an insecure transport has no keys")
        await self._keys.replace(keys)
        self._listener.keys_changed()
        self._dialer.keys_changed(self._keys)

    def keep_connected(self, peers: Iterable[Address]) -> None:
        """Stay connected to these peers from now on, dialling again whenever a session ends; replaces the
        peers given before. Needs no answer: who cannot be reached is tried again, ever more seldom."""
        self._keeper.keep(peer for peer in peers if peer != self.address)

    async def prefetch(self, target: Address, order: PrefetchOrder) -> PrefetchResult:
        """Have the engine at `target` pull blocks from a third one, `order.source`, with no request attached.

        Raises:
            PullError: as `lookup` for a target that cannot be reached or refuses; PROTOCOL if it takes no
                such orders, REFUSED_LIMIT beyond its rate.
        """
        return await self._consumer.prefetch(target, order)

    async def lookup(
        self,
        source: Address,
        kv_request_id: str,
        hashes: Sequence[bytes],
        *,
        deadline_s: float,
        wait_s: float = 0.0,
    ) -> Offer:
        """Ask `source` which contiguous prefix of `hashes` it holds, and have it pinned there.

        Args:
            deadline_s: for everything, a first connection included; should exceed `wait_s`.
            wait_s: how long the source may wait for a supply announced under `kv_request_id`.

        Raises:
            PullError: MISS, REFUSED_*, UNREACHABLE, TIMEOUT, DISCONNECTED, PROTOCOL.
        """
        return await self._consumer.lookup(source, kv_request_id, hashes, deadline_s, wait_s)

    async def fetch(self, offer: Offer, slots: Sequence[int], *, deadline_s: float) -> Fetched:
        """Move the first `len(slots)` blocks of `offer` into `slots` of our tier and verify them.

        Uses the offer up, whatever happens. If this call is *cancelled*, treat every slot as
        quarantined: `slots_usable` names each of them in time, perhaps at once.

        Raises:
            PullError: with `quarantined`; slots not in it are free at once.
            ValueError: the slots do not fit the offer or the tier.
        """
        return await self._consumer.fetch(offer, slots, deadline_s)

    def abandon(self, offer: Offer) -> None:
        """Give an offer back unfetched; idempotent, harmless after `fetch`."""
        self._consumer.abandon(offer)

    def _mover_changed(self, mover: Mover) -> None:
        self.stats.mover_epoch = mover.epoch
        self._listener.mover_changed(mover)
        for session in self._dialer.sessions:
            session.mover_changed(mover)

    def _session_opened(self, session: OutboundSession) -> None:
        if self._movers.current is not None:
            session.mover_changed(self._movers.current)
