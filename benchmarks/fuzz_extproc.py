"""`python -m benchmarks.fuzz_extproc --sequences 1000000`: mutated ext_proc conversations, without gRPC.

Each sequence is a good conversation of random shape whose messages are then dropped, doubled, swapped, turned
into each other or filled with odd values, read by the real stream, session, director and picker; the gateway
may vanish at any read or write, and the handler may decide at once, later, never or not at all. Afterwards
nothing may be open, booked or counted as running. Fails with the seed of the sequence. The short form is a
test (tests/unit/extproc/test_fuzz.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import logging
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import grpc
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import NoEndpoints
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import Endpoint, EndpointMetrics, Outcome
from epp.director import Director
from epp.extproc import events as ev
from epp.extproc import wire
from epp.extproc.conversations import Limits
from epp.extproc.service import ExtProcService
from epp.telemetry.metrics import PickerMetrics

BODIES = (
    b"",
    b"{}",
    b'{"model":"m","prompt":"Hello"}',
    b'{"model":"m","prompt":[1,2,3]}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}]}',
    b"[" * 200,
    b'{"model":',
    b"\xff\xfe\x00",
    b"x" * 5_000,
    b'{"prompt":"' + b"y" * 63_000 + b'"}',
)
ANSWERS = (
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n',
    b'{"model":"m","usage":{"prompt_tokens":-1}}',
    b": ping\n\n",
    b'"usage":' * 50,
    b"",
    b"\x00" * 100,
)
HEADERS = (
    ("x-request-id", b"r"),
    ("x-request-id", b"\xff\n" * 50),
    ("content-length", b"99999999999999999999"),
    ("content-length", b"30"),
    ("content-type", b"application/json"),
    ("content-type", b"text/event-stream"),
    ("content-encoding", b"gzip"),
    ("prefer", b"if-available"),
    (wire.MODEL_NAME_REWRITE[0], b"other"),
    (wire.FAIRNESS_ID[0], b"f"),
    ("X-Upper", b"\xf0\x9f\x98\x80"),
)
SUBSETS = ("10.0.0.1", "10.0.0.1:8000, 10.0.0.2", "", "10.9.9.9", 7, None, ["10.0.0.2"], {"a": 1})
ENDPOINTS = 3
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: active-request-scorer}, {type: max-score-picker}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}, {pluginRef: active-request-scorer}, {pluginRef: max-score-picker}]
"""


class Vanished(Exception):
    """What the harness must never see: a stream ended in a way that is none."""


# ---- a good conversation, and what becomes of it ---------------------------------------------------


def conversation(rng: random.Random) -> list[pb.ProcessingRequest]:
    messages = [_headers("request_headers", rng, (":method", b"POST"), (":path", rng.choice(_PATHS)))]
    body = rng.choice(BODIES)
    if rng.random() < 0.15:
        messages[0].request_headers.end_of_stream = True
    else:
        messages += _bodies("request_body", body, rng)
    if rng.random() < 0.1:
        messages.append(pb.ProcessingRequest())
        messages[-1].request_trailers.SetInParent()
    messages.append(_headers("response_headers", rng, (":status", rng.choice((b"200", b"503", b"x", b"")))))
    for _ in range(rng.randrange(3)):
        messages += _bodies("response_body", rng.choice(ANSWERS), rng)[:-1]
    messages += _bodies("response_body", b"", rng)
    if rng.random() < 0.1:
        messages.append(pb.ProcessingRequest())
        messages[-1].response_trailers.SetInParent()
    if rng.random() < 0.3:
        config = messages[0].protocol_config
        config.request_body_mode = rng.choice((0, 1, 2, 3, 4, 5, 4, 4, 2))
        config.response_body_mode = rng.choice((0, 1, 2, 3, 4, 5, 4, 4))
    return messages


_PATHS = (b"/v1/completions", b"/v1/chat/completions", b"/v1/models", b"/x?y=\xff", b"")


def _headers(kind: str, rng: random.Random, *fields: tuple[str, bytes]) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    headers = getattr(message, kind).headers.headers
    for name, value in (*fields, *rng.sample(HEADERS, rng.randrange(4))):
        headers.add(key=name, raw_value=value)
    if rng.random() < 0.2:
        _hint(message, rng.choice(SUBSETS))
    return message


def _hint(message: pb.ProcessingRequest, value: Any) -> None:
    hint = message.metadata_context.filter_metadata[wire.SUBSET_NAMESPACE]
    hint.update({wire.SUBSET_KEY: value})


def _bodies(kind: str, body: bytes, rng: random.Random) -> list[pb.ProcessingRequest]:
    cut = rng.randrange(len(body) + 1)
    found = []
    for part in (body[:cut], body[cut:], b""):
        message = pb.ProcessingRequest()
        getattr(message, kind).body = part
        found.append(message)
    getattr(found[-1], kind).end_of_stream = True
    return found


def mutate(messages: list[pb.ProcessingRequest], rng: random.Random) -> list[Any]:
    """Some messages are not what they were; an exception stands for a read that fails with it."""
    mutated: list[Any] = list(messages)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        if not mutated:
            break
        at = rng.randrange(len(mutated))
        match rng.randrange(9):
            case 0:
                del mutated[at]
            case 1:
                mutated.insert(rng.randrange(len(mutated) + 1), mutated[at])
            case 2:
                other = rng.randrange(len(mutated))
                mutated[at], mutated[other] = mutated[other], mutated[at]
            case 3:
                del mutated[at:]
            case 4:
                mutated[at] = pb.ProcessingRequest()
            case 5:
                mutated[at] = rng.choice(conversation(rng))
            case 6:
                mutated[at] = _flipped(mutated[at], rng)
            case 7:
                mutated.insert(at, DecodeError("cut"))
            case 8:
                mutated.insert(at, grpc.aio.UsageError("gone"))
    return mutated


def _flipped(message: Any, rng: random.Random) -> Any:
    """The message with a bit of its bytes changed, where that is still a message."""
    if not isinstance(message, pb.ProcessingRequest):
        return message
    data = bytearray(message.SerializeToString())
    if not data:
        return message
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    try:
        return pb.ProcessingRequest.FromString(bytes(data))
    except DecodeError as error:
        return error


# ---- who talks to whom -----------------------------------------------------------------------------


class Gateway:
    """A stream context that says `messages` and may vanish at a write, by error or by cancel."""

    def __init__(self, messages: list[Any], rng: random.Random) -> None:
        self._messages = messages
        self._rng = rng
        self._leaves_at = rng.randrange(12) if rng.random() < 0.2 else -1
        self._writes = 0
        self.aborted: grpc.StatusCode | None = None

    async def read(self) -> Any:
        if self._rng.random() < 0.3:
            await asyncio.sleep(0)
        if not self._messages:
            return grpc.aio.EOF
        message = self._messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, message: pb.ProcessingResponse) -> None:
        message.SerializeToString()
        self._writes += 1
        if self._writes == self._leaves_at:
            raise asyncio.CancelledError if self._rng.random() < 0.5 else grpc.aio.UsageError("gone")
        if self._rng.random() < 0.2:
            await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, _: str) -> None:
        self.aborted = code


class Handler:
    """The director, sometimes slow, sometimes broken."""

    def __init__(self, director: Director, rng: random.Random) -> None:
        self._director = director
        self._rng = rng
        self.told: Counter[str] = Counter()
        self._finished: set[str] = set()

    def decide(self, head: ev.RequestHead, body: bytes | None) -> ev.Routing | Awaitable[ev.Routing]:
        chance = self._rng.random()
        if chance < 0.03:
            raise RuntimeError("a fault")
        if chance < 0.06:
            raise NoEndpoints("none")
        if chance < 0.3:
            return self._late(head, body, stubborn=chance < 0.1)
        return self._director.decide(head, body)

    async def _late(self, head: ev.RequestHead, body: bytes | None, *, stubborn: bool) -> ev.Routing:
        try:
            for _ in range(self._rng.randrange(4)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if not stubborn:
                raise
        routing = self._director.decide(head, body)
        return routing if isinstance(routing, ev.Routing) else await routing

    def first_token(self, token: object) -> None:
        self.told["first_token"] += 1
        self._director.first_token(token)

    def finished(self, token: object, outcome: Outcome) -> None:
        decision_id: str = token.decision_id  # type: ignore[attr-defined]
        if decision_id in self._finished:
            raise Vanished("a decision was finished twice")
        self._finished.add(decision_id)
        self.told["finished"] += 1
        self._director.finished(token, outcome)


class Harness:
    """One service for all sequences; `check` says whether anything is left of them."""

    def __init__(self) -> None:
        settings = parse_config(CONFIG).settings
        self.picker = EndpointPicker(settings, CacheView(PythonPrefixIndex(bytes(16))))
        for number in range(ENDPOINTS):
            self.picker.upsert_endpoint(Endpoint(EndpointId(f"e{number}"), f"10.0.0.{number}", 8000))
            self.picker.update_metrics(EndpointId(f"e{number}"), EndpointMetrics(0.0, 0.0, 0.0, 0.0, 16))
        self.registry = CollectorRegistry()
        self.director = Director(self.picker, None, PickerMetrics(self.registry))
        self.aborted = 0
        self.decided = 0

    async def run(self, seed: int) -> None:
        """One sequence. Raises what must not happen."""
        rng = random.Random(seed)
        handler = Handler(self.director, rng)
        service = ExtProcService(handler, Limits(max_body_bytes=100_000))
        gateway = Gateway(mutate(conversation(rng), rng), rng)
        try:
            await service.process(None, gateway)  # type: ignore[arg-type]
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        await service.settle(10.0)
        stats = service.stats
        left = (stats.streams_open, stats.decisions_open, stats.deciding)
        if left != (0, 0, 0):
            raise Vanished(f"left open: streams, decisions, deciding {left}")
        self.aborted += gateway.aborted is not None
        self.decided += handler.told["finished"]

    def check(self) -> None:
        for endpoint in self.picker.endpoints:
            load = self.picker.ledger.load(endpoint.id)
            if (load.requests, load.uncached_prompt_tokens, load.pulls_served) != (0, 0, 0):
                raise Vanished(f"booked on {endpoint.id}: {load}")
        for family in self.registry.collect():
            if family.name == "llm_d_epp_request_running" and any(s.value for s in family.samples):
                raise Vanished("requests counted as running")


async def fuzz(first_seed: int, sequences: int, *, seconds: float = float("inf")) -> dict[str, int]:
    """Raises what went wrong, with the seed in a note."""
    harness, ends_s, done = Harness(), time.monotonic() + seconds, 0
    for seed in range(first_seed, first_seed + sequences):
        try:
            await harness.run(seed)
            if seed % 1_000 == 0:
                harness.check()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        done += 1
        if done % 100 == 0 and time.monotonic() > ends_s:
            break
    await asyncio.sleep(0)
    harness.check()
    tasks = {task.get_name() for task in asyncio.all_tasks()}
    if tasks & {"extproc-read", "extproc-decide"}:
        raise Vanished(f"tasks left: {tasks}")
    return {"sequences": done, "finished": harness.decided, "refused_by_protocol": harness.aborted}


def _share(first_seed: int, sequences: int, seconds: float) -> dict[str, int]:
    """What one process does: on the picker's own loop, and collecting cycles as seldom as the picker does."""
    logging.disable(logging.CRITICAL)
    gc.set_threshold(50_000, 20, 20)
    found = uvloop.run(fuzz(first_seed, sequences, seconds=seconds))
    return found | {"cpu_us": round(time.process_time() * 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    started_s = time.monotonic()
    ends = [arguments.sequences * i // arguments.processes for i in range(arguments.processes + 1)]
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        shares = [
            pool.submit(_share, arguments.seed + start, end - start, arguments.seconds)
            for start, end in itertools.pairwise(ends)
        ]
        for share in shares:
            total.update(share.result())
    cpu_us = total.pop("cpu_us") / max(1, total["sequences"])
    print(json.dumps({**total, "seconds": round(time.monotonic() - started_s), "cpu_us_each": round(cpu_us)}))


if __name__ == "__main__":
    main()
