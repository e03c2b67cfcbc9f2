"""A restarted replica is warm with the first replay: real engine sockets, real TLS, both replicas whole.

Replica A has heard everything; the engine's replay buffer has wrapped since. B starts with A's snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from engine_plugin.identity import EndpointId
from epp.core.endpoint_picker import EndpointPicker
from epp.core.index_choice import available_indexes
from epp.core.types import ClaimState, Endpoint, PrefixMatch
from epp.kvevents.manager import KvEventsManager
from epp.replicas import Replicas, ReplicaSettings
from tests.integration.kvevents.rig import FAST, HOST, Engine, WatchedView, removed, running, stored
from tests.integration.siblings.certificates import NAME
from tests.integration.siblings.rig import PATIENT, WAIT_S, at
from tests.unit.core.test_endpoint_picker import SETTINGS

A = EndpointId("engine-a")
BLOCKS = 40
BUFFER = 20  # batches that the engine can still replay


class Replica:
    """A picker with its event intake and its snapshot port, joined as the application joins them."""

    def __init__(self, directory: Path, *siblings: Replica, keep_s: float = 60.0) -> None:
        addresses = tuple(at(sibling.port) for sibling in siblings)
        settings = ReplicaSettings(directory, addresses, HOST, 0, PATIENT, keep_s)
        self.replicas = Replicas(settings)

    async def start(self, implementation: str = "pure", seed: bytes | None = None) -> None:
        make = available_indexes()[implementation]
        self.seed = await self.replicas.take_seed(seed, make.scheme)
        self.view = WatchedView(index=make(self.seed))
        self.picker = EndpointPicker(SETTINGS, self.view)
        self.events = KvEventsManager(self.view, FAST)
        self.replicas.serve_from(self.picker, self.seed, make.scheme, self._address_of)

    def discover(self, engine: Engine, endpoint: EndpointId = A, rank: int = 0) -> None:
        source = engine.source()
        self.picker.upsert_endpoint(Endpoint(endpoint, HOST, 8000 + rank), has_replay=True)
        subscribe = partial(self.events.add_endpoint, endpoint, source)
        self.replicas.offer(self.picker, endpoint, source.host, source.events_port, subscribe)

    def _address_of(self, endpoint: EndpointId) -> tuple[str, int] | None:
        source = self.events.source(endpoint)
        return None if source is None else (source.host, source.events_port)

    @property
    def port(self) -> int:
        assert self.replicas.server is not None
        return self.replicas.server.port

    def match(self, endpoint: EndpointId = A) -> PrefixMatch:
        return self.view.match_of(endpoint, BLOCKS + 20)

    async def live(self, endpoint: EndpointId = A) -> None:
        await self.view.until(lambda: self.view.state(endpoint).has_claim)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        assert self.replicas.server is not None
        serving = asyncio.create_task(self.replicas.server.run())
        try:
            async with running(self.events):
                yield
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(serving, WAIT_S)
            self.replicas.server.close()


async def warm(directory: Path, engine: Engine, implementation: str = "pure") -> Replica:
    """Start a replica that is there from the engine's first batch on; to be used with `running`."""
    replica = Replica(directory)
    await replica.start(implementation)
    return replica


async def fill(replica: Replica, engine: Engine) -> None:
    await engine.subscribed()
    await replica.live()
    for block in range(BLOCKS):
        await engine.publish(stored(block))
    await engine.publish(stored(0, 5, tier="CPU", extra_keys=[None] * 5))
    await replica.view.until(lambda: replica.match().cpu_blocks == 5)
    engine.buffer = engine.buffer[-BUFFER:]


@pytest.mark.parametrize("implementation", sorted(available_indexes()))
async def test_a_restarted_replica_is_warm_after_one_replay(
    certificates: Path, new_engine: Callable[[], Engine], implementation: str
) -> None:
    engine = new_engine()
    first = await warm(certificates, engine, implementation)
    async with first.running():
        first.discover(engine)
        await fill(first, engine)
        second, cold = Replica(certificates, first), Replica(certificates)
        await second.start(implementation)
        await cold.start(implementation)
        assert second.seed == first.seed != cold.seed
        engine.keep(removed(30))  # what happens between the snapshot and the replay
        async with second.running(), cold.running():
            engine.requests.clear()
            second.discover(engine)
            assert second.match() == PrefixMatch(ClaimState.UNKNOWN, block_size_tokens=4)
            await second.live()
            assert len(engine.requests) == 1
            assert second.match() == PrefixMatch(ClaimState.LIVE, 30, 30, 5, 4, known_empty_start=True)
            cold.discover(engine)  # the control: the same start without a snapshot
            await cold.live()
            assert cold.match() == PrefixMatch(ClaimState.PARTIAL, 5, 0, 5, 4)  # what the buffer tells
            await engine.publish(stored(30))  # and both hear what comes later
            for replica in (first, second):
                await replica.view.until(lambda replica=replica: replica.match().blocks == BLOCKS)
                assert replica.match() == PrefixMatch(ClaimState.LIVE, 40, 40, 5, 4, known_empty_start=True)
    counters = second.view.stats(A).counters
    assert (counters.snapshots_confirmed, counters.snapshots_refused, counters.clears) == (1, 0, 0)
    assert second.replicas.facts().fetched.outcome == "complete"


async def test_an_engine_that_restarted_after_the_snapshot_gets_no_claim_from_it(
    certificates: Path, new_engine: Callable[[], Engine]
) -> None:
    engine = new_engine()
    first = await warm(certificates, engine)
    async with first.running():
        first.discover(engine)
        await fill(first, engine)
        second = Replica(certificates, first)
        await second.start()
        await engine.restart()
        async with second.running():
            second.discover(engine)
            await second.live()
            assert second.match() == PrefixMatch(ClaimState.LIVE, known_empty_start=True)
            assert second.view.stats(A).index.device_blocks == 0
            assert second.view.stats(A).counters.snapshots_refused == 1
            assert set(second.view.depths_seen) == {0}


async def test_an_endpoint_without_a_claim_is_not_given(
    certificates: Path, new_engine: Callable[[], Engine]
) -> None:
    """The sibling is SYNCING itself: for that endpoint there is nothing, for the other there is."""
    engine, mute = new_engine(), new_engine()
    other = EndpointId("engine-b")
    first = await warm(certificates, engine)
    async with first.running():
        first.discover(engine)
        await fill(first, engine)
        mute.may_answer.clear()
        first.discover(mute, other, rank=1)
        await mute.until(lambda e: e.requests == [0])
        assert first.view.state(other) is ClaimState.SYNCING
        second = Replica(certificates, first)
        await second.start()
        assert second.replicas.facts().held == 1
        mute.may_answer.set()
        async with second.running():
            second.discover(mute, other, rank=1)
            second.discover(engine)
            await second.live()
            await second.live(other)
            assert second.match().blocks == BLOCKS
            assert second.view.stats(other).counters.snapshots_confirmed == 0


async def test_rows_of_endpoints_that_moved_or_never_come_are_dropped(
    certificates: Path, new_engine: Callable[[], Engine]
) -> None:
    engine, elsewhere = new_engine(), new_engine()
    first = await warm(certificates, engine)
    async with first.running():
        first.discover(engine)
        await fill(first, engine)
        second, third = Replica(certificates, first), Replica(certificates, first, keep_s=0.0)
        await second.start()
        await third.start()
        third.replicas.expire()
        async with second.running(), third.running():
            second.discover(elsewhere)
            third.discover(engine)
            await second.live()
            await third.live()
            assert second.match().blocks == 0
            assert third.match().state is ClaimState.PARTIAL
    assert second.replicas.facts().holding.moved == 1
    assert third.replicas.facts().holding.expired == 1


async def test_another_implementation_starts_cold_and_says_so(
    certificates: Path, new_engine: Callable[[], Engine], caplog: pytest.LogCaptureFixture
) -> None:
    if len(available_indexes()) < 2:
        pytest.skip("the compiled index is not built here")
    engine = new_engine()
    first = await warm(certificates, engine)
    async with first.running():
        first.discover(engine)
        await fill(first, engine)
        second = Replica(certificates, first)
        await second.start("compiled")
        assert second.seed != first.seed
        assert second.replicas.facts().fetched.outcome == "scheme"
        assert "refused: another scheme" in caplog.text
        async with second.running():
            second.discover(engine)
            await second.live()
            assert second.match().state is ClaimState.PARTIAL


async def test_an_injected_seed_wins_over_a_siblings(
    certificates: Path, new_engine: Callable[[], Engine]
) -> None:
    engine = new_engine()
    first = await warm(certificates, engine)
    async with first.running():
        first.discover(engine)
        await fill(first, engine)
        same, other = Replica(certificates, first), Replica(certificates, first)
        await same.start(seed=first.seed)
        await other.start(seed=b"n" * 16)
        assert (same.seed, same.replicas.facts().held) == (first.seed, 1)
        assert (other.seed, other.replicas.facts().held) == (b"n" * 16, 0)
        assert other.replicas.facts().fetched.outcome == "seed"
        for replica in (same, other):
            assert replica.replicas.server is not None
            replica.replicas.server.close()


async def test_two_replicas_that_start_together_do_not_wait_for_each_other(certificates: Path) -> None:
    """Neither listens before it has asked: both are refused a connection at once and start cold."""
    first = Replica(certificates)
    await first.start()
    port = first.port
    assert first.replicas.server is not None
    first.replicas.server.close()
    settings = ReplicaSettings(certificates, (at(port, NAME),), HOST, port, PATIENT)
    pair = [Replicas(settings), Replicas(settings)]
    async with asyncio.timeout(WAIT_S):
        seeds = await asyncio.gather(*(replica.take_seed(None, "s-1") for replica in pair))
    assert len(set(seeds)) == 2
    assert [replica.facts().fetched.outcome for replica in pair] == ["unreachable"] * 2
