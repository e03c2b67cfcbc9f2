"""Two (or more) real transports on loopback with real movers, and a small block store for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine_plugin.transport import Faults, Lease, Limits, PeerIdentity, PeerTransport, Prefetcher, TierMemory
from engine_plugin.transport.control import pool_tls

pool_tls._SCRYPT_COST = 1 << 4  # some hundred transports are made here
KEY = b"0123456789abcdef0123456789abcdef"
BLOCK_BYTES = 32 * 1024
WAIT_S = 20.0
PATIENT = Limits(progress_s=10.0, first_progress_s=10.0, quarantine_s=1.0, connect_s=5.0, handshake_s=5.0)


def block_content(block_hash: bytes, block_bytes: int = BLOCK_BYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that are a function of the hash, so that any wrong block is seen."""
    seed = int.from_bytes(block_hash[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, block_bytes, dtype=np.uint8)


def hashes(count: int, first: int = 0) -> list[bytes]:
    """`count` distinct block hashes."""
    return [(first + at + 1).to_bytes(8, "big") + b"rest" * 6 for at in range(count)]


def identity(**changes: Any) -> PeerIdentity:
    """A fresh instance that is compatible with every other of these, but for `changes`."""
    base = PeerIdentity(
        instance=uuid.uuid4().hex,
        rank=0,
        model="tiny",
        revision="r1",
        block_size_tokens=16,
        block_bytes=BLOCK_BYTES,
        dtype="bfloat16",
        layout="hnd",
        tp_size=1,
        hash_algo="sha256_cbor",
        seed_fp="00ff",
    )
    return replace(base, **changes)


class Store:
    """A CPU tier as a dict; pins are counted, and usable slots signalled."""

    def __init__(self, tier: TierMemory) -> None:
        self.tier = tier
        self.held: dict[bytes, int] = {}
        self.generations = [0] * tier.slots
        self.pins: dict[str, tuple[int, ...]] = {}
        self.usable: list[int] = []
        self.usable_changed = asyncio.Event()
        self.supply = asyncio.Event()
        self.still_valid: Callable[[], bool] | None = None
        self._ids = itertools.count()

    def put(self, block_hashes: Sequence[bytes], slots: Sequence[int] | None = None) -> None:
        """Hold these blocks, in the given slots (default: 0, 1, ...)."""
        for block_hash, slot in zip(block_hashes, slots or range(len(block_hashes)), strict=False):
            self.tier.array[slot] = block_content(block_hash, self.tier.slot_bytes)
            self.generations[slot] += 1
            self.held[block_hash] = slot

    async def lease(self, wanted: Sequence[bytes], kv_request_id: str, wait_s: float) -> Lease | None:
        if wait_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.supply.wait()
        slots = tuple(self.held[h] for h in itertools.takewhile(self.held.__contains__, wanted))
        if not slots:
            return None
        lease_id = str(next(self._ids))
        self.pins[lease_id] = slots
        return Lease(lease_id, slots, tuple(self.generations[s] for s in slots), self.still_valid)

    def release(self, lease_id: str) -> None:
        self.pins.pop(lease_id, None)

    def slots_usable(self, slots: Sequence[int]) -> None:
        self.usable += slots
        self.usable_changed.set()

    def assert_blocks(self, block_hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """These slots hold exactly these blocks."""
        for block_hash, slot in zip(block_hashes, slots, strict=True):
            assert np.array_equal(self.tier.array[slot], block_content(block_hash, self.tier.slot_bytes))


class Engine:
    """One transport with its tier and store."""

    def __init__(self, transport: PeerTransport, store: Store, who: PeerIdentity, faults: Faults) -> None:
        self.transport = transport
        self.store = store
        self.identity = who
        self.faults = faults

    @property
    def stats(self) -> Any:
        return self.transport.stats


@contextlib.asynccontextmanager
async def engine(
    *,
    slots: int = 64,
    slot_bytes: int = BLOCK_BYTES,
    key: bytes | None = KEY,
    limits: Limits = PATIENT,
    checksums: bool = True,
    prefetcher: Prefetcher | None = None,
    listen: tuple[str, int] = ("127.0.0.1", 0),
    **changes: Any,
) -> AsyncIterator[Engine]:
    """A running transport; stopped, and its tier closed, at the end."""
    who = identity(block_bytes=slot_bytes, **changes)
    with TierMemory.create(slots, slot_bytes) as tier:
        store, faults = Store(tier), Faults()
        transport = PeerTransport(
            listen=listen,
            identity=who,
            tier=tier,
            store=store,
            keys=() if key is None else (key,),
            insecure=key is None,
            checksums=checksums,
            prefetcher=prefetcher,
            limits=limits,
            faults=faults,
        )
        try:
            await transport.start()
            yield Engine(transport, store, who, faults)
        finally:
            await transport.stop()


async def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait for a condition on plain values (counters); fails when it does not come true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (plain counters, no event to wait for)
            await asyncio.sleep(0.005)
