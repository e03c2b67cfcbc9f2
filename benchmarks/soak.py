"""`make soak`: a fleet under load while its data path is broken on purpose. Exits 1 on a loss.

Every prompt has one right answer (the emulated engines compute it from the KV bytes they hold), so a
wrong byte anywhere shows as a wrong answer. Faults, one at a time, in an order given by the seed:

    mover_kill    SIGKILL of an engine's mover: its transfers die, a new one starts under a new epoch
    mover_freeze  SIGSTOP of a mover for longer than a pull may take, then SIGCONT: late writes
    torn_block    a producer announces checksums that its bytes do not have
    mute_lookup   a producer accepts look-ups and never answers
    held_move     a producer stops in the middle of a move
    cold_cache    an engine drops both tiers
    engine_kill   SIGKILL of an engine with its mover; started again at once

A request counts as lost when it failed although no engine was killed or starting while it ran, or failed
three times. A request cut off by a kill of its own engine is asked again and counted as `asked_again`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.client import CHAT, RequestFailed
from deploy.local.errors import FleetError
from deploy.local.fleet import Fleet, running_fleet
from deploy.local.ports import AddressPlan
from deploy.local.scenario.texts import Texts, chat, question
from deploy.local.spec import ROOT, FleetSpec

DOCUMENTS = 24
DOCUMENT_TOKENS = 4096
DEVICE_TIER_TOKENS = 24 * 1024  # six documents: what an engine restores
CPU_TIER_TOKENS = 48 * 1024  # twelve of them: holders change all the time
QUESTIONS = 8
ANSWER_TOKENS = 8
ATTEMPTS = 3
FAULT_PAUSE_S = (0.5, 1.5)
FREEZE_S = 2.5


@dataclass(slots=True)
class Tally:
    """What happened, in numbers."""

    requests: int = 0
    answered: int = 0
    lost: int = 0
    wrong_answers: int = 0
    asked_again: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of the picker, by request
    pulls: Counter[str] = field(default_factory=Counter)  # of the engines: what became of pulls
    pulled_tokens: int = 0
    slowest_ms: float = 0.0
    examples: list[str] = field(default_factory=list)


class Soak:
    """One run."""

    def __init__(self, fleet: Fleet, requests: int, workers: int, seed: int) -> None:
        self._fleet = fleet
        self._wanted = requests
        self._workers = workers
        self._rng = random.Random(seed)
        self._texts = Texts(fleet.spec.tokenizer)
        self._answers: dict[tuple[int, int], str] = {}
        self._killed_at_s = -1e9
        self._starting = 0
        self.tally = Tally()

    async def run(self) -> None:
        load = asyncio.gather(*(self._work(n) for n in range(self._workers)))
        faults = asyncio.create_task(self._break_things())
        progress = asyncio.create_task(self._tell())
        try:
            await load
        finally:
            for task in (faults, progress):
                task.cancel()
            await asyncio.gather(faults, progress, return_exceptions=True)

    async def _work(self, number: int) -> None:
        rng = random.Random(f"{self._rng.random()}-{number}")
        while self.tally.requests < self._wanted:
            self.tally.requests += 1
            document = min(int(rng.paretovariate(0.7)) - 1, DOCUMENTS - 1)  # a few are hot
            await self._ask(f"soak-{self.tally.requests:06d}", document, rng.randrange(QUESTIONS))

    async def _ask(self, request_id: str, document: int, number: int) -> None:
        text = self._texts.document(f"soak {document}", DOCUMENT_TOKENS)
        body = chat([question(text, f"What does part {number} say?")], max_tokens=ANSWER_TOKENS)
        for attempt in range(ATTEMPTS):
            started_s = time.monotonic()
            attempt_id = f"{request_id}.{attempt}"
            try:
                answer = await self._fleet.gateway.stream(CHAT, body, request_id=attempt_id)
            except RequestFailed as error:
                if not self._excused(started_s):
                    self._lose(f"{error}")
                    return
                self.tally.asked_again += 1
                await self._fleet.wait_live(self._fleet.spec.pods)
                continue
            await self._note(attempt_id, (document, number), answer.text, answer.ttft_ms)
            return
        self._lose(f"{request_id}: failed {ATTEMPTS} times")

    async def _note(self, request_id: str, key: tuple[int, int], text: str, ttft_ms: float) -> None:
        self.tally.answered += 1
        self.tally.slowest_ms = max(self.tally.slowest_ms, ttft_ms)
        if not text or self._answers.setdefault(key, text) != text:
            self.tally.wrong_answers += 1
            self.tally.examples.append(f"{request_id}: another answer than before")
        decision = await self._fleet.picker.decision(request_id)
        if decision is None:
            return
        self.tally.reasons[decision.reason] += 1
        if decision.source is not None and self._starting == 0:
            account = await self._fleet.engine(decision.destination).account(request_id)
            if account is not None:
                self.tally.pulls[account.pull_reason or "none"] += 1
                self.tally.pulled_tokens += account.pulled_tokens

    def _excused(self, started_s: float) -> bool:
        """Whether an engine was killed, or not up again, at any time since."""
        return self._starting > 0 or self._killed_at_s >= started_s

    def _lose(self, why: str) -> None:
        self.tally.lost += 1
        self.tally.examples.append(why)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(10)
            t = self.tally
            print(
                f"{t.answered:6d} of {self._wanted} answered, {sum(t.faults.values())} faults, "
                f"{t.pulled_tokens} tokens pulled, {t.lost} lost, {t.wrong_answers} wrong",
                flush=True,
            )

    # --- faults -----------------------------------------------------------------------------------
    async def _break_things(self) -> None:
        faults: list[Callable[[str], Awaitable[None]]] = [
            self._mover_kill,
            self._mover_freeze,
            self._torn_block,
            self._mute_lookup,
            self._held_move,
            self._cold_cache,
            self._engine_kill,
        ]
        while True:
            await asyncio.sleep(self._rng.uniform(*FAULT_PAUSE_S))
            fault, pod = self._rng.choice(faults), self._rng.choice(self._fleet.spec.pods)
            self.tally.faults[fault.__name__.removeprefix("_")] += 1
            await fault(pod)

    async def _mover_kill(self, pod: str) -> None:
        _signal_mover(self._fleet.pids[pod], signal.SIGKILL)

    async def _mover_freeze(self, pod: str) -> None:
        mover = _signal_mover(self._fleet.pids[pod], signal.SIGSTOP)
        try:
            await asyncio.sleep(FREEZE_S)
        finally:
            if mover is not None:
                _signal(mover, signal.SIGCONT)

    async def _torn_block(self, pod: str) -> None:
        await self._for_a_while(pod, corrupt_block=self._rng.randrange(8))
        await self._fleet.engine(pod).faults(corrupt_block=None)

    async def _mute_lookup(self, pod: str) -> None:
        await self._for_a_while(pod, stall_lookup=True)
        await self._fleet.engine(pod).faults(stall_lookup=False, proceed=True)
        await self._fleet.engine(pod).faults(proceed=False)

    async def _held_move(self, pod: str) -> None:
        await self._for_a_while(pod, hold_after_chunks=1)
        await self._fleet.engine(pod).faults(hold_after_chunks=None, proceed=True)
        await self._fleet.engine(pod).faults(proceed=False)

    async def _for_a_while(self, pod: str, **fault: int | bool) -> None:
        await self._fleet.engine(pod).faults(**fault)
        await asyncio.sleep(self._rng.uniform(1.0, 2.0))

    async def _cold_cache(self, pod: str) -> None:
        await self._fleet.engine(pod).reset_cache(cpu_tier_too=True)

    async def _engine_kill(self, pod: str) -> None:
        self._starting += 1
        try:
            await self._fleet.kill_engine(pod)
            await self._fleet.start_engine(pod)
            await self._fleet.wait_live(self._fleet.spec.pods)
        finally:
            self._starting -= 1
            self._killed_at_s = time.monotonic()


def _signal_mover(engine_pid: int, number: signal.Signals) -> int | None:
    """Signal the mover among the children of an engine; None where it is just being replaced."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            is_mover = b"engine_plugin.transport.mover" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
        if parent == engine_pid and is_mover:
            _signal(pid, number)
            return pid
    return None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


async def _leftovers(fleet: Fleet) -> dict[str, int]:
    """What must be nothing once the load has ended: requests in flight, by endpoint."""
    for _ in range(100):
        rows = await fleet.picker.endpoints()
        left = {pod: row.inflight for pod, row in rows.items() if row.inflight}
        if not left:
            return {}
        await asyncio.sleep(0.1)
    return left


async def main(arguments: argparse.Namespace) -> int:
    spec = FleetSpec(
        addresses=AddressPlan(block="127.0.3", port_offset=20_000),
        out_dir=ROOT / "out" / "soak",
        time_scale=arguments.time_scale,
        picker_config=ROOT / "config" / "epp" / "load-first.yaml",
        device_tier_tokens=DEVICE_TIER_TOKENS,
        cpu_tier_tokens=CPU_TIER_TOKENS,
    )
    started_s = time.monotonic()
    async with running_fleet(spec, print) as fleet:
        soak = Soak(fleet, arguments.requests, arguments.workers, arguments.seed)
        await soak.run()
        leftovers = await _leftovers(fleet)
    tally = soak.tally
    figures = {
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - started_s),
        "requests": tally.requests,
        "answered": tally.answered,
        "lost": tally.lost,
        "wrong_answers": tally.wrong_answers,
        "asked_again_after_engine_kill": tally.asked_again,
        "faults": dict(sorted(tally.faults.items())),
        "faults_total": sum(tally.faults.values()),
        "decisions": dict(sorted(tally.reasons.items())),
        "pulls": dict(sorted(tally.pulls.items())),
        "pulled_tokens": tally.pulled_tokens,
        "slowest_ttft_ms": round(tally.slowest_ms),
        "inflight_left": leftovers,
    }
    for example in tally.examples[:20]:
        print(example)
    print(json.dumps(figures))
    return 1 if tally.lost or tally.wrong_answers or leftovers else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-scale", type=float, default=0.3, help="of the engines' modelled time")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(_arguments())))
    except FleetError as problem:
        sys.exit(f"soak: {problem}")
