"""The emulated engine and the simulator tell the same time for the same work.

The emulated engine's own scheduler, requests and cache run here against a counter instead of a clock; the
simulator runs as it is. Admission is set to the emulated engine's (it starts requests behind full steps).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.local.engine.content import SeedChain
from deploy.local.engine.hashing import Block, BlockHasher
from deploy.local.engine.request import Request, Spec, State
from deploy.local.engine.scheduler import Portion, Scheduler
from epp.engine_model.cache import PagedCache
from tests.unit.simulator.world import PROFILE, SMALL, fleet, text

WORK = [  # (sent at, text, prompt tokens, answer tokens)
    (0.0, 1, 9_000, 40),
    (0.05, 2, 30_000, 25),
    (0.1, 1, 9_500, 60),
    (0.1, 3, 700, 90),
    (1.0, 2, 30_000, 10),
    (4.0, 1, 12_000, 5),
    (4.5, 4, 50_000, 30),
]


class EmulatedInVirtualTime:
    """`deploy.local.engine.core`'s loop without bytes, peers and asyncio: admit, plan, step, complete."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.scheduler = Scheduler(timing=PROFILE.timing, max_running=64, max_waiting=1000)
        self.device = PagedCache(SMALL.device_tokens // 64, SMALL.cpu_tokens // 64).device
        self.hasher = BlockHasher(block_size=64, seed="0", algorithm="sha256")
        self.first_token_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.answered: dict[str, int] = {}

    def run(self, requests: list[Request]) -> None:
        todo = sorted(requests, key=lambda r: r.arrived_s)
        while todo or not self.scheduler.idle:
            if self.scheduler.idle:
                self.now_s = max(self.now_s, todo[0].arrived_s)
            while todo and todo[0].arrived_s <= self.now_s:
                self.scheduler.submit(todo.pop(0))
            self.scheduler.admit(self._start)
            portions = self.scheduler.plan()
            self.now_s += self.scheduler.step_ms(portions) * 1e-3
            for portion in portions:
                self._complete(portion)

    def _start(self, request: Request) -> State | None:
        names = [block.name for block in request.chain[: request.reusable_blocks(64)]]
        held = self.device.prefix(names)
        self.device.pin(held)
        allocation = self.device.allocate(request.reserved_blocks(64) - len(held))
        assert allocation is not None
        request.slots = [*held, *allocation.slots]
        request.computed = len(held) * 64
        return State.RUNNING

    def _complete(self, portion: Portion) -> None:
        request = portion.request
        last = min(portion.stop // 64, len(request.chain))
        for block in request.chain[portion.start // 64 : last]:
            self.device.commit(request.slots[block.index], block.name)
        request.computed = portion.stop
        if portion.stop < request.prompt_tokens:
            return
        name = request.spec.request_id
        self.first_token_s.setdefault(name, self.now_s)
        self.answered[name] = self.answered.get(name, 0) + 1
        if self.answered[name] == request.spec.max_tokens:
            self.ended_s[name] = self.now_s
            self.scheduler.drop(request)
            self.device.unpin(request.slots)


def emulated() -> EmulatedInVirtualTime:
    engine = EmulatedInVirtualTime()
    requests = []
    for number, (at_s, which, prompt, answer) in enumerate(WORK):
        tokens = [int(t) for t in text(which, prompt + answer).tokens]
        chain: list[Block] = []
        engine.hasher.extend(chain, tokens, salt=None, lora_name=None)  # the answer is known before
        spec = Spec(str(number), tuple(tokens[:prompt]), answer)
        requests.append(Request(spec, chain, SeedChain(), at_s))
    engine.run(requests)
    return engine


def test_the_emulated_engine_and_the_simulator_agree_on_every_time() -> None:
    theirs = emulated()
    ours = fleet(engines=1, shape=replace(SMALL, admits_ahead=True))
    for at_s, which, prompt, answer in WORK:
        ours.timeline.at(at_s, ours.submit, text(which, prompt + answer), prompt, answer)
    ours.run()
    for record in ours.records:
        number = record.request_id.rpartition("-")[2]
        assert record.first_token_s == pytest.approx(theirs.first_token_s[number], abs=1e-9)
        assert record.ended_s == pytest.approx(theirs.ended_s[number], abs=1e-9)


def test_another_timing_would_show() -> None:
    """The negative control of the test above."""
    theirs = emulated()
    ours = fleet(engines=1, shape=replace(SMALL, admits_ahead=True))
    engine = next(iter(ours.engines.values()))
    engine.profile = replace(PROFILE, timing=replace(PROFILE.timing, token_us=PROFILE.timing.token_us * 1.01))
    for at_s, which, prompt, answer in WORK:
        ours.timeline.at(at_s, ours.submit, text(which, prompt + answer), prompt, answer)
    ours.run()
    record = ours.records[1]
    assert record.first_token_s != pytest.approx(theirs.first_token_s["1"], abs=1e-4)
