"""A producer in a process of its own, so that a test can kill or stop it with its mover.

Argument: JSON {blocks, slots, first, hold_after_chunks, stall_lookup, port, slot_bytes, apart, limits}, where
`apart` 2 puts the blocks into every other slot.
Says on stdout, one JSON line each: ready, holding (for each move), state. Ends when stdin closes; on stdin
`hold 3` makes moves stop after three chunks, `proceed` lets them go, `state` asks for the state.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

from tests.integration.transport.rig import BLOCK_BYTES, PATIENT, Engine, engine, hashes


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def tell_holding(peer: Engine) -> None:
    while True:
        await peer.faults.holding.wait()
        peer.faults.holding.clear()
        say(event="holding", chunks=peer.stats.chunks_written, leases=peer.stats.leases)


async def main(wanted: dict[str, Any]) -> None:
    limits = replace(PATIENT, **({"chunk_bytes": 1 << 20} | wanted.get("limits", {})))
    slot_bytes = wanted.get("slot_bytes", BLOCK_BYTES)
    listen = ("127.0.0.1", wanted.get("port", 0))
    async with engine(slots=wanted["slots"], slot_bytes=slot_bytes, limits=limits, listen=listen) as peer:
        blocks, apart = wanted["blocks"], wanted.get("apart", 1)
        peer.store.put(hashes(blocks, wanted.get("first", 0)), range(0, apart * blocks, apart))
        peer.faults.hold_after_chunks = wanted.get("hold_after_chunks")
        peer.faults.stall_lookup = wanted.get("stall_lookup", False)
        telling = asyncio.create_task(tell_holding(peer))
        say(
            event="ready",
            port=peer.transport.address[1],
            mover=peer.transport.mover_pid,
            me=peer.identity.instance,
        )
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line.startswith("hold"):
                peer.faults.proceed.clear()
                peer.faults.hold_after_chunks = int(line.split()[1])
            elif line.strip() == "proceed":
                peer.faults.hold_after_chunks = None
                peer.faults.proceed.set()
            else:
                say(
                    event="state",
                    leases=peer.stats.leases,
                    pins=len(peer.store.pins),
                    moves=peer.stats.moves_out,
                    mover=peer.transport.mover_pid or 0,
                )
        telling.cancel()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
