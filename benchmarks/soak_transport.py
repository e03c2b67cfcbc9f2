"""Pulls between transport processes, broken at every stage: part of `make soak`. Exits 1 on a loss.

One consumer in this process, one producer process with its mover, a relay on their control line. Each
schedule is a seed: when (a number of bytes of the control conversation, so anywhere from the first of the TLS
handshake to the last of the move, or a number of chunks written), what (SIGKILL or SIGSTOP of engine, mover
or both, of our own mover; the line cut, or mute), and for how long. Afterwards:

    wrong     a block that was called usable and holds other bytes, or a byte that landed in a slot after the
              transport had named it usable
    stuck     a pull that did not end, or a slot that stayed in quarantine
    leaked    a lease, pin or move left at the producer
    dead      an engine that ended although nobody killed it
    broken    no pull succeeded any more once the fault was over

Half of the schedules move blocks as they lie, half move small scattered ones, which travel packed.
`python -m benchmarks.soak` does the like to whole emulated engines under load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.transport_schedules import BLOCKS, LAYOUTS, LIMITS, PLAIN, Layout, Schedule
from engine_plugin.transport import PullError
from tests.integration.transport.peer_process import PeerProcess
from tests.integration.transport.rig import Engine, engine, hashes
from tests.integration.transport.wiretap import Wiretap, wiretap

WANTED: Final = hashes(BLOCKS)
FILLER: Final = 0xA5
PULL_S: Final = 3.0
BOUND_S: Final = 90.0  # for what must come, on a machine as busy as it likes


@dataclass(slots=True)
class Tally:
    """What happened, in numbers."""

    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    losing_seeds: list[int] = field(default_factory=list)
    longest_pull_s: float = 0.0
    blocks_verified: int = 0
    packed_moves: int = 0

    def report(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Loss(Exception):
    """Something that must never happen; its text is the kind."""


class Field:
    """The pair under test; the producer is replaced when it was killed."""

    def __init__(self, layout: Layout, consumer: Engine, tap: Wiretap, stack: AsyncExitStack) -> None:
        self.layout = layout
        self.consumer = consumer
        self.tap = tap
        self.producer: PeerProcess
        self._stack = stack
        self._slots_free = asyncio.Event()

    async def new_producer(self) -> None:
        self.producer = await self._stack.enter_async_context(self.layout.new_producer())
        self.tap.target = self.producer.address

    async def pull(self, slots: range, deadline_s: float) -> int:
        """Verified blocks; what the transport calls usable is compared with what it must be."""
        offer = await self.consumer.transport.lookup(self.tap.address, "r", WANTED, deadline_s=deadline_s)
        fetched = await self.consumer.transport.fetch(offer, slots[: offer.hit_blocks], deadline_s=deadline_s)
        try:
            self.consumer.store.assert_blocks(WANTED[: fetched.blocks], slots[: fetched.blocks])
        except AssertionError as exc:
            raise Loss("wrong") from exc
        return fetched.blocks

    @property
    def exposed(self) -> Any:
        """The part of the tier that a schedule's pull may write into."""
        return self.consumer.store.tier.array[: self.layout.spare.start]

    def strike(self, fault: str) -> None:
        """Now. A process that is gone already, or not up yet, is not struck."""
        own = self.consumer.transport.mover_pid
        match fault:
            case "kill_engine":
                self.producer.signal(signal.SIGKILL)
            case "kill_mover":
                _signal(self.producer.mover_pid, signal.SIGKILL)
            case "stop_engine":
                self.producer.signal(signal.SIGSTOP, mover=False)
            case "stop_mover":
                _signal(self.producer.mover_pid, signal.SIGSTOP)
            case "stop_both":
                self.producer.signal(signal.SIGSTOP)
            case "kill_own_mover":
                _signal(own or 0, signal.SIGKILL)
            case "stop_own_mover":
                _signal(own or 0, signal.SIGSTOP)
            case "cut":
                self.tap.cut()
            case "mute":
                self.tap.open.clear()

    def relent(self, own_mover: int) -> None:
        """Everything that was stopped goes on."""
        self.producer.signal(signal.SIGCONT)
        _signal(own_mover, signal.SIGCONT)
        self.tap.open.set()


def _signal(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def run_schedule(field_: Field, schedule: Schedule, tally: Tally) -> None:
    """Raises Loss."""
    consumer = field_.consumer
    tally.schedules += 1
    tally.faults[schedule.fault] += 1
    consumer.store.usable.clear()
    own_mover = consumer.transport.mover_pid or 0
    if schedule.fresh_session:
        field_.tap.cut()
        await _until("stuck", lambda: consumer.stats.sessions_out == 0)
    started_s = time.monotonic()
    pulling = asyncio.create_task(field_.pull(field_.layout.slots, PULL_S))
    await _strike_in_time(field_, schedule, pulling)
    await asyncio.sleep(schedule.lasts_s)
    if schedule.lasts_s:
        field_.relent(own_mover)
    tally.outcomes[await _outcome(consumer, pulling)] += 1
    tally.longest_pull_s = max(tally.longest_pull_s, time.monotonic() - started_s)
    field_.exposed[:] = FILLER  # reused: from here on not a byte of that pull may land
    field_.relent(own_mover)
    await _recovered(field_, schedule, tally)


async def _strike_in_time(field_: Field, schedule: Schedule, pulling: asyncio.Task[int]) -> None:
    """When the schedule says; once the pull is over, if it was over before."""
    struck = asyncio.Event()

    def strike() -> None:
        field_.strike(schedule.fault)
        struck.set()

    moment: asyncio.Task[Any]
    if schedule.bytes_in is None:
        field_.producer.write(f"hold {schedule.chunks}")
        moment = asyncio.create_task(field_.producer.heard("holding"))
    else:
        field_.tap.after(schedule.bytes_in, strike)
        moment = asyncio.create_task(struck.wait())
    await asyncio.wait({moment, pulling}, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
    field_.tap.disarm()
    if not struck.is_set():
        strike()
    moment.cancel()
    await asyncio.wait({moment})
    field_.producer.write("proceed")


async def _outcome(consumer: Engine, pulling: asyncio.Task[int]) -> str:
    """How the pull ended, once its slots are free. Raises Loss."""
    done, _ = await asyncio.wait({pulling}, timeout=BOUND_S)
    if not done:
        pulling.cancel()
        raise Loss("stuck")
    try:
        await pulling
    except PullError as error:
        held = set(error.quarantined)
        await _until("stuck", lambda: held <= set(consumer.store.usable))
        return error.reason.value
    return "ok"


async def _recovered(field_: Field, schedule: Schedule, tally: Tally) -> None:
    """Nothing is left of it, and pulls bring blocks again. Raises Loss."""
    consumer, producer = field_.consumer, field_.producer
    if schedule.fault == "kill_engine":
        if producer.alive:
            await producer.ended()
        await field_.new_producer()
    elif not producer.alive:
        await field_.new_producer()
        raise Loss("dead")
    until_s = time.monotonic() + BOUND_S
    while True:
        try:
            tally.blocks_verified += await field_.pull(field_.layout.spare, 10.0)
            break
        except PullError as error:
            await _until("stuck", lambda: consumer.stats.quarantined_slots == 0)
            if time.monotonic() > until_s:
                raise Loss("broken") from error
            await asyncio.sleep(0.1)
    await _until("stuck", lambda: consumer.stats.quarantined_slots == 0 and consumer.stats.moves_in == 0)
    while True:
        state = await field_.producer.state()
        if (state["leases"], state["pins"], state["moves"]) == (0, 0, 0):
            break
        if time.monotonic() > until_s:
            raise Loss("leaked")
        await asyncio.sleep(0.05)
    if not (field_.exposed == FILLER).all():
        raise Loss("wrong")


async def _until(loss: str, condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > until_s:
            raise Loss(loss)
        await asyncio.sleep(0.01)


async def soak(
    schedules: int,
    seed: int,
    *,
    layout: Layout = PLAIN,
    forced: Callable[[int], Schedule] = Schedule.drawn,
    tally: Tally | None = None,
) -> Tally:
    """Run seeds `seed`, `seed + 1`, ..., counting into `tally`; the pair is rebuilt after a loss."""
    tally = tally if tally is not None else Tally()
    seeds = iter(range(seed, seed + schedules))
    while await _on_one_pair(layout, seeds, tally, forced):
        pass
    return tally


async def _on_one_pair(
    layout: Layout, seeds: Iterator[int], tally: Tally, drawn: Callable[[int], Schedule]
) -> bool:
    """Until the seeds are over, or a loss; True after a loss."""
    async with AsyncExitStack() as stack:
        slots = layout.spare.start + layout.apart * BLOCKS
        consumer = await stack.enter_async_context(
            engine(slots=slots, slot_bytes=layout.slot_bytes, limits=LIMITS)
        )
        tap = await stack.enter_async_context(wiretap(("127.0.0.1", 0)))
        field_ = Field(layout, consumer, tap, stack)
        stack.callback(lambda: _count_packed(consumer, tally))
        await field_.new_producer()
        for seed in seeds:
            try:
                await run_schedule(field_, drawn(seed), tally)
            except Loss as loss:
                tally.losses[str(loss)] += 1
                tally.losing_seeds.append(seed)
                field_.relent(consumer.transport.mover_pid or 0)
                return True
    return False


def _count_packed(consumer: Engine, tally: Tally) -> None:
    tally.packed_moves += consumer.stats.packed_moves


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    options = parser.parse_args()
    logging.basicConfig(level="ERROR")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_TLS", "tcp")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.monotonic()
    tally = Tally()
    each = options.schedules // len(options.layouts)
    with contextlib.suppress(KeyboardInterrupt):  # what was done until then is told all the same
        for at, name in enumerate(options.layouts):
            asyncio.run(soak(each, options.seed + at * each, layout=LAYOUTS[name], tally=tally))
    json.dump(tally.report() | {"seconds": time.monotonic() - started_s}, sys.stdout, indent=1)
    print()
    return 1 if tally.losses or tally.schedules < each * len(options.layouts) else 0


if __name__ == "__main__":
    sys.exit(main())
