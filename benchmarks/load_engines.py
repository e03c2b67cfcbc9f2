"""Body of the process that plays the engines for `benchmarks.index_load`: real PUB and ROUTER sockets.

    python -m benchmarks.load_engines storm ENDPOINTS BLOCKS EVENT_BLOCKS      replays from full buffers
    python -m benchmarks.load_engines sustained ENDPOINTS RATE EVENT_BLOCKS  RATE blocks/s stored and removed

Prints one JSON line with the ports of every endpoint, then works until its standard input ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zmq

from epp.kvevents.framing import END_OF_REPLAY

HOST, TOPIC = "127.0.0.1", b"kv-events"
BLOCK_TOKENS = 16
CYCLE, HELD = 64, 32  # messages of an endpoint before they repeat; how many stores are held at a time
_TICK_S = 0.01

Socket = zmq.Socket[bytes]


@dataclass(slots=True)
class _Engine:
    pub: Socket
    router: Socket
    messages: list[bytes]


def stored(rng: random.Random, hashes: list[int], parent: int | None) -> dict[str, object]:
    """One store of blocks of random tokens, as vLLM 0.32 writes it."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": array("H", rng.randbytes(2 * BLOCK_TOKENS * len(hashes))).tolist(),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _hashes(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def storm_messages(rng: random.Random, blocks: int, event_blocks: int) -> Iterator[bytes]:
    """A buffer of stores: chains of 64 messages."""
    encode, parent = msgspec.msgpack.Encoder().encode, None
    for number in range(blocks // event_blocks):
        hashes = _hashes(rng, event_blocks)
        yield encode([0.0, [stored(rng, hashes, parent)], 0])
        parent = None if number % 64 == 63 else hashes[-1]


def cycle_messages(rng: random.Random, event_blocks: int) -> Iterator[bytes]:
    """Messages that can repeat for ever: each stores some blocks and removes those of half a cycle ago."""
    encode = msgspec.msgpack.Encoder().encode
    names = [_hashes(rng, event_blocks) for _ in range(CYCLE)]
    for number, hashes in enumerate(names):
        gone = names[(number - HELD) % CYCLE][::-1]
        removal = {"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0}
        yield encode([0.0, [stored(rng, hashes, None), removal], 0])


def _open(context: zmq.Context[Socket]) -> tuple[Socket, Socket]:
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    for socket in (pub, router):
        socket.linger, socket.sndhwm = 0, 0
        socket.bind(f"tcp://{HOST}:0")
    return pub, router


def _port(socket: Socket) -> int:
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _seq(number: int) -> bytes:
    return number.to_bytes(8, "big")


def answer_replays(buffers: dict[Socket, list[bytes]]) -> None:
    """Replay whatever is asked for, for ever."""
    poller = zmq.Poller()
    for socket in buffers:
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            peer, _, start = socket.recv_multipart()[-3:]
            messages = buffers[socket]
            for number in range(int.from_bytes(start, "big"), len(messages)):
                socket.send_multipart([peer, b"", TOPIC, _seq(number), messages[number]])
            socket.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])


def publish(engines: list[_Engine], blocks_per_s: float, event_blocks: int) -> None:
    """Every endpoint stores (and removes) `blocks_per_s`, in its own cycle, from now on for ever."""
    started_s, sent = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - started_s) * blocks_per_s / event_blocks)
        for number in range(sent, due):
            for engine in engines:
                engine.pub.send_multipart([TOPIC, _seq(number), engine.messages[number % CYCLE]])
        sent = due
        time.sleep(_TICK_S)


def main() -> None:
    mode, endpoints, amount, event_blocks = (
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]),
        int(sys.argv[4]),
    )
    context: zmq.Context[Socket] = zmq.Context(1)
    context.set(zmq.MAX_SOCKETS, 4 * endpoints + 16)
    rng = random.Random(5)
    engines = []
    for _ in range(endpoints):
        if mode == "storm":
            made = storm_messages(rng, int(amount) // endpoints, event_blocks)
        else:
            made = cycle_messages(rng, event_blocks)
        engines.append(_Engine(*_open(context), list(made)))
    ports = [(_port(e.pub), _port(e.router)) for e in engines]
    print(json.dumps({"ports": ports, "messages": sum(len(e.messages) for e in engines)}), flush=True)
    buffers = {e.router: e.messages if mode == "storm" else [] for e in engines}
    threading.Thread(target=answer_replays, args=(buffers,), daemon=True).start()
    if mode == "sustained":
        sys.stdin.readline()  # everybody has subscribed
        threading.Thread(target=publish, args=(engines, amount, event_blocks), daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # the thread may be in the middle of a send


if __name__ == "__main__":
    main()
