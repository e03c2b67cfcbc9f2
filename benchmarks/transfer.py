"""What a pull costs between two transports: `make bench NAME=transfer`. JSON on standard output.

Two whole transports (TLS, leases, movers) in one process, their movers in processes of their own, and a bare
NIXL pair beside them; all are measured in turn within one loop, so that noise of the machine hits them alike.
Best of `--rounds`, because other work on the machine only ever adds time. Figures:

    raw_ms            one bare WRITE of the same bytes in one descriptor
    data_ms           the producer's mover, from its order to its report (checksums off)
    data_share        raw / data, as a share of the bare speed; target 0.7 at 16 and 256 MB
    fetch_ms          the whole fetch as the engine sees it, checksums off
    checksums_ms      what verification adds to it
    lookup_ms         look-up with checksums of a known content
    added_us          at 1 MB: fetch beyond the bare transfer
    scattered         the same with every block on its own, by block size, as it comes and with packing
                      withheld; cpu: of both movers, which noise of the machine does not touch
    concurrent        N pulls of 8 MB from one producer by two consumers: MB/s, slowest / median, shares
    cold_ms, connected_ms, insecure_cold_ms   the first pull of a pair: nothing open; after `connect`
    idle_core_share   an idle transport with one open session: mover and control together
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.raw_transfer import RawPair
from engine_plugin.identity import PeerIdentity
from engine_plugin.transport import Lease, Limits, PeerTransport, TierMemory
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.mover.windows import Windows

MB: Final = 1 << 20
SIZES: Final = (1, 16, 256)
KEY: Final = b"benchmark-key-of-32-bytes-length"
LIMITS: Final = replace(
    Limits(), progress_s=30.0, first_progress_s=30.0, queue_s=30.0, connect_s=10.0, handshake_s=10.0
)
WHO: Final = PeerIdentity("0" * 32, 0, "m", "r", 16, 1, "bf16", "hnd", 1, "sha256", "ff")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Store:
    """Holds a block for every slot; its hash is the slot's number."""

    async def lease(self, hashes: Sequence[bytes], kv_request_id: str, wait_s: float) -> Lease:
        slots = tuple(int.from_bytes(each, "big") for each in hashes)
        return Lease(kv_request_id, slots, (1,) * len(slots))

    def release(self, lease_id: str) -> None:
        """Nothing is pinned."""

    def slots_usable(self, slots: Sequence[int]) -> None:
        """Nothing is quarantined here."""


@dataclass(slots=True)
class Side:
    """One transport and its tier."""

    transport: PeerTransport
    tier: TierMemory


@contextlib.asynccontextmanager
async def side(
    slots: int, slot_bytes: int, *, host: str = "127.0.0.1", checksums: bool = False, insecure: bool = False
) -> AsyncIterator[Side]:
    who = replace(WHO, instance=uuid.uuid4().hex, block_bytes=slot_bytes)
    with TierMemory.create(slots, slot_bytes) as tier:
        tier.array[:] = 1
        transport = PeerTransport(
            listen=(host, 0),
            identity=who,
            tier=tier,
            store=Store(),
            keys=() if insecure else (KEY,),
            insecure=insecure,
            checksums=checksums,
            limits=LIMITS,
        )
        await transport.start()
        try:
            yield Side(transport, tier)
        finally:
            await transport.stop()


async def pull(
    consumer: Side, producer: Side, sources: Sequence[int], targets: Sequence[int]
) -> tuple[float, ...]:
    """Seconds of the look-up and of the fetch."""
    hashes = [slot.to_bytes(8, "big") for slot in sources]
    started_s = time.perf_counter()
    offer = await consumer.transport.lookup(producer.transport.address, "r", hashes, deadline_s=60)
    found_s = time.perf_counter()
    fetched = await consumer.transport.fetch(offer, targets, deadline_s=60)
    ended_s = time.perf_counter()
    assert fetched.blocks == len(targets)
    return found_s - started_s, ended_s - found_s


class WriteTimes:
    """How long movers took from an order to its report."""

    def __init__(self) -> None:
        self.last_s = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[WriteTimes]:
        real = Mover.write

        def write(mover: Mover, *arguments: Any) -> Any:
            started_s = time.perf_counter()
            ended = real(mover, *arguments)
            ended.add_done_callback(lambda _: setattr(self, "last_s", time.perf_counter() - started_s))
            return ended

        Mover.write = write  # type: ignore[method-assign]
        try:
            yield self
        finally:
            Mover.write = real  # type: ignore[method-assign]


async def sizes(rounds: int) -> dict[str, Any]:
    """One contiguous run of 64 KiB blocks against one descriptor."""
    slot_bytes, largest = 64 << 10, max(SIZES) * MB
    slots = largest // slot_bytes
    found: dict[str, Any] = {}
    async with (
        side(slots, slot_bytes) as producer,
        side(slots, slot_bytes) as consumer,
        side(slots, slot_bytes, checksums=True) as checked_producer,
        side(slots, slot_bytes, checksums=True) as checked,
    ):
        with RawPair(largest) as raw, WriteTimes().watching() as writes:
            for size in SIZES:
                run = range(size * MB // slot_bytes)
                best: dict[str, float] = {}
                for _ in range(rounds * (4 if size < 64 else 1)):
                    times = {"raw": raw.transfer_s(size * MB)}
                    _, times["fetch"] = await pull(consumer, producer, run, run)
                    times["data"] = writes.last_s
                    times["lookup"], times["checked"] = await pull(checked, checked_producer, run, run)
                    best = {name: min(best.get(name, taken), taken) for name, taken in times.items()}
                found[f"{size}_mb"] = {
                    "raw_ms": best["raw"] * 1e3,
                    "data_ms": best["data"] * 1e3,
                    "data_share": best["raw"] / best["data"],
                    "fetch_ms": best["fetch"] * 1e3,
                    "fetch_share": best["raw"] / best["fetch"],
                    "checksums_ms": (best["checked"] - best["fetch"]) * 1e3,
                    "lookup_ms": best["lookup"] * 1e3,
                    "added_us": (best["fetch"] - best["raw"]) * 1e6,
                }
    return found


async def scattered(rounds: int) -> dict[str, Any]:
    """16 MB in blocks that are nobody's neighbours at either end."""
    found: dict[str, Any] = {}
    for slot_kb in (4, 16, 32, 64):
        slot_bytes, blocks = slot_kb << 10, 16 * MB // (slot_kb << 10)
        async with side(2 * blocks, slot_bytes) as producer, side(2 * blocks, slot_bytes) as consumer:
            with RawPair(16 * MB) as raw, WriteTimes().watching() as writes:
                best: dict[str, float] = {}
                for _ in range(rounds * 2):
                    times = {"raw": raw.transfer_s(16 * MB), "raw_pieces": raw.transfer_s(16 * MB, blocks)}
                    for more, withheld in (("", False), ("_unpacked", True)):
                        times |= await _scattered_pull(consumer, producer, blocks, more, withheld)
                        times["data" + more] = writes.last_s
                    best = {name: min(best.get(name, taken), taken) for name, taken in times.items()}
        found[f"{slot_kb}_kb"] = {f"{name}_ms": taken * 1e3 for name, taken in best.items()}
        found[f"{slot_kb}_kb"]["packed"] = consumer.transport.stats.packed_moves > 0
        found[f"{slot_kb}_kb"]["data_share"] = best["raw"] / best["data"]
    return found


async def _scattered_pull(
    consumer: Side, producer: Side, blocks: int, more: str, withheld: bool
) -> dict[str, float]:
    """One pull of every other slot into every other, backwards. `withheld`: no window is offered."""
    mover = consumer.transport._movers.current
    assert mover is not None
    mover.windows = Windows(0 if withheld else mover.inbox[1])
    pids = [pid for side in (consumer, producer) if (pid := side.transport.mover_pid) is not None]
    before_s = sum(_on_cpu_s(pid) for pid in pids)
    targets = range(2 * blocks - 1, -1, -2)
    _, fetch_s = await pull(consumer, producer, range(0, 2 * blocks, 2), targets)
    return {f"fetch{more}": fetch_s, f"cpu{more}": sum(_on_cpu_s(pid) for pid in pids) - before_s}


async def concurrent(rounds: int) -> dict[str, Any]:
    """N pulls at once, half of them from each of two addresses."""
    slot_bytes, blocks = 64 << 10, 128
    found: dict[str, Any] = {}
    async with (
        side(32 * blocks, slot_bytes) as producer,
        side(32 * blocks, slot_bytes, host="127.0.0.2") as one,
        side(32 * blocks, slot_bytes, host="127.0.0.3") as other,
    ):
        for count in (1, 2, 4, 8, 16, 32):
            best: dict[str, Any] = {}
            for _ in range(rounds):
                ends: list[tuple[float, bool]] = []
                started_s = time.perf_counter()

                async def one_pull(at: int) -> None:
                    run = range(at * blocks, (at + 1) * blocks)
                    await pull((one, other)[at % 2], producer, run, run)
                    ends.append((time.perf_counter() - started_s, bool(at % 2)))  # noqa: B023

                await asyncio.gather(*(one_pull(at) for at in range(count)))
                rate = count * 8 / ends[-1][0]
                if rate > best.get("mb_per_s", 0.0):
                    first = ends[: max(1, count // 2)]
                    best = {
                        "mb_per_s": rate,
                        "slowest_ms": ends[-1][0] * 1e3,
                        "slowest_of_median": ends[-1][0] / statistics.median(end for end, _ in ends),
                        "others_share_of_first_half": sum(which for _, which in first) / len(first),
                    }
            found[str(count)] = best
    return found


async def first_pulls(rounds: int) -> dict[str, float]:
    """One 64 KiB block between two transports that have never met."""
    taken: dict[str, list[float]] = {"cold_ms": [], "connected_ms": [], "insecure_cold_ms": []}
    for _ in range(rounds):
        for name, times in taken.items():
            insecure = name.startswith("insecure")
            async with (
                side(4, 64 << 10, insecure=insecure) as producer,
                side(4, 64 << 10, insecure=insecure) as consumer,
            ):
                if name == "connected_ms":
                    await consumer.transport.connect(producer.transport.address, deadline_s=30)
                    await asyncio.sleep(0.5)
                times.append(sum(await pull(consumer, producer, [0], [0])) * 1e3)
    return {name: min(times) for name, times in taken.items()}


async def idle(seconds: float) -> dict[str, float]:
    """CPU of a pair with an open session that nobody uses, once what was going on has cooled down."""
    async with side(64, 64 << 10) as producer, side(64, 64 << 10) as consumer:
        await pull(consumer, producer, [0], [0])
        await asyncio.sleep(4.0)
        pids = [producer.transport.mover_pid, consumer.transport.mover_pid, os.getpid()]
        before = [_cpu_s(pid) for pid in pids if pid is not None]
        await asyncio.sleep(seconds)
        used = [_cpu_s(pid) - was for pid, was in zip(pids, before, strict=True) if pid is not None]
    return {"movers_core_share": sum(used[:2]) / 2 / seconds, "control_core_share": used[2] / 2 / seconds}


def _on_cpu_s(pid: int) -> float:
    """As `_cpu_s` of its first thread, exact to the microsecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


PARTS: Final = {"sizes": sizes, "scattered": scattered, "concurrent": concurrent, "first_pulls": first_pulls}


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--only", choices=[*PARTS, "idle"], nargs="*", default=[*PARTS, "idle"])
    options = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_TLS", "tcp")
    found: dict[str, Any] = {}
    for name in options.only:
        part = idle(options.idle_s) if name == "idle" else PARTS[name](options.rounds)
        found[name] = await part
        json.dump({name: found[name]}, sys.stdout, indent=1)
        print(flush=True)
    print(json.dumps(measures(found)))


def measures(found: dict[str, Any]) -> dict[str, float]:
    """The last line: what was measured of the names that every reader of it knows."""
    told = {}
    if "sizes" in found:
        sizes = found["sizes"]
        told["added_us_1mb"] = sizes["1_mb"]["added_us"]
        told["raw_share_16mb"] = sizes["16_mb"]["data_share"]
        told["raw_share_256mb"] = sizes["256_mb"]["data_share"]
        told["checksum_cost_256mb"] = sizes["256_mb"]["checksums_ms"] / sizes["256_mb"]["fetch_ms"]
    if "concurrent" in found:
        told["fair_32"] = found["concurrent"]["32"]["slowest_of_median"]
    return {name: round(value, 3) for name, value in told.items()}


if __name__ == "__main__":
    asyncio.run(main())
