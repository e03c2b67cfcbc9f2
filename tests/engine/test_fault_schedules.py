"""Ten seeded faults between two serving engines, one at each stage of a pull and over again.

Whatever happens: the right answer, both engines alive, nothing pinned or set aside for ever, and the next
pull between the two brings its blocks. Kills are of movers here; a whole engine is killed in
`test_pull_failures`.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.control_line import TURNS, ControlLine
from tests.engine.pull_engines import (
    BLOCK_BYTES,
    PullEngine,
    fresh,
    mover_of,
    processes_of,
    source_params,
    until,
)
from tests.engine.reports import Reports

pytestmark = pytest.mark.timeout(900)
BLOCKS = 24
KINDS = (
    "cut",
    "mute",
    "freeze",
    "kill_mover",
    "cut",
    "freeze_mover",
    "mute",
    "kill_own_mover",
    "freeze",
    "kill_mover",
)
STAGES = random.Random(8).sample(range(1, TURNS + 1), TURNS)


class Fault:
    """What happens when a pull has come so far, and how it is mended afterwards."""

    def __init__(self, kind: str, puller: PullEngine, producer: PullEngine) -> None:
        self._kind = kind
        self._puller = puller
        self._producer = producer
        self._stopped: list[int] = []

    def strike(self, line: ControlLine) -> None:
        match self._kind:
            case "cut":
                line.cut()
            case "mute":
                line.mute()
            case "freeze":
                self._stop(processes_of(self._producer.process.pid))
            case "freeze_mover":
                self._stop([mover_of(self._producer)])
            case "kill_mover":
                os.kill(mover_of(self._producer), signal.SIGKILL)
            case "kill_own_mover":
                os.kill(mover_of(self._puller), signal.SIGKILL)

    def mend(self) -> None:
        for pid in self._stopped:
            _signal(pid, signal.SIGCONT)

    def _stop(self, pids: Iterable[int]) -> None:
        self._stopped = list(pids)
        for pid in self._stopped:
            _signal(pid, signal.SIGSTOP)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def settled(*engines: PullEngine) -> Callable[[], bool]:
    """Nothing is pinned for a peer, nothing is set aside."""
    return lambda: all(
        engine.metric("kvpull_leases") == engine.metric("kvpull_quarantined_slots") == 0 for engine in engines
    )


def pull_brings_its_blocks(puller: PullEngine, producer: PullEngine) -> bool:
    """Without a fault, over the producer's own port. False where a remembered failure still answers."""
    ids = fresh(BLOCKS)
    producer.complete(ids)
    own = producer.complete(ids)
    before = puller.metric("kvpull_pull_received_bytes_total")
    answer = puller.complete(ids, params=puller.pull_from(producer, "after"))
    assert answer.tokens == own.tokens
    moved = puller.metric("kvpull_pull_received_bytes_total") - before
    assert moved in (0, BLOCKS * BLOCK_BYTES)
    return moved > 0


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_a_seeded_fault(seed: int, source: PullEngine, consumer: PullEngine, source_reports: Reports) -> None:
    """The more impatient of the two pulls."""
    puller, producer = source, consumer
    stage = STAGES[seed % TURNS]
    ids = fresh(BLOCKS)
    producer.complete(ids)
    own = producer.complete(ids)
    fault = Fault(KINDS[seed], puller, producer)
    line = ControlLine(producer.p2p_port, stage, fault.strike)
    before = puller.metric("kvpull_pull_received_bytes_total")
    try:
        with ThreadPoolExecutor(2) as threads:
            pulled = threads.submit(
                puller.complete, ids, params=source_params("127.0.0.1", line.port, f"fault-{seed}")
            )
            beside = threads.submit(puller.complete, fresh(2))
            assert len(beside.result().tokens) == 8
            answer = pulled.result()
    finally:
        fault.mend()
    assert line.acted, f"the pull never came to stage {stage}"
    assert answer.tokens == own.tokens
    moved = puller.metric("kvpull_pull_received_bytes_total") - before
    assert moved == answer.cached // 32 * BLOCK_BYTES, "what counts as received was used, and nothing else"
    told = source_reports.of(f"fault-{seed}")
    assert (told.received_bytes, told.reason == "ok") == (moved, moved == BLOCKS * BLOCK_BYTES)
    line.cut()
    until(settled(puller, producer))
    until(lambda: pull_brings_its_blocks(puller, producer))
    for engine in (puller, producer):
        assert engine.process.running, f"{engine.name} has ended"
