"""`python -m benchmarks.fuzz_events --inputs 1000000`: hostile batches for the compiled decoder and index.

Every input is decoded by the codec and by the compiled decoder, which have to agree on the verdict, on
what is unknown and on every event; what decodes is applied to one compiled index, which checks itself at
intervals. Memory must stay where it was after the first tenth, and nothing may be left at the end.
For the memory checks of the compiler, build the extensions as docs/index.md says.

Last line: JSON. Exit status 1, with the input in hex, at the first fault.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from benchmarks.event_inputs import LENGTH_BYTES
from engine_plugin.identity import EndpointId
from epp.core.engine_blocks import IndexLimits
from epp.core.events import Batch
from epp.core.index_choice import COMPILED, PURE, available_indexes
from epp.core.prefix_index import PrefixIndex, PrefixQuery, PythonPrefixIndex
from epp.kvevents.codec import decode_batch
from epp.kvevents.framing import CodecError
from epp.kvevents.packed_codec import Decode, make_packed_decoder

ENDPOINTS: Final = tuple(EndpointId(f"pod-{number}") for number in range(4))
LIMITS: Final = IndexLimits(max_blocks=5_000, max_waiting_blocks=500, max_remembered_blocks=200)
CHECK_EVERY: Final = 1_000
LOOK_UP_EVERY: Final = 10
MAX_GROWTH_BYTES: Final = 32 << 20
SEED: Final = b"f" * 16
# the first blocks of the chains of `event_inputs`
PROMPTS: Final = [
    PrefixQuery(
        [t for name in range(chain * 50, chain * 50 + 30) for t in (name, 200 + name, 40_000, 2**31 + name)]
    )
    for chain in range(8)
]


class Disagreement(AssertionError):
    """The two decoders, or the two indexes, say different things."""


@dataclass(slots=True)
class Figures:
    inputs: int = 0
    accepted: int = 0
    packed_events: int = 0
    other_events: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    windowed_blocks: int = 0  # of sliding-window groups
    found_blocks: int = 0  # in look-ups of the chains that the inputs are about
    checks: int = 0
    resident_after_tenth_mib: float = 0.0
    resident_at_end_mib: float = 0.0


def resident_bytes() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096


def verdict(decode: Decode, payload: bytes) -> Batch | str:
    """The batch, or why it was refused."""
    try:
        return decode(payload)
    except CodecError as error:
        return error.reason


def require_same(packed: Batch | str, plain: Batch | str) -> None:
    """Raises Disagreement unless both verdicts say the same."""
    if isinstance(packed, str) or isinstance(plain, str):
        if packed != plain:
            raise Disagreement(f"verdicts differ: {packed!r:.200} and {plain!r:.200}")
        return
    mine = packed.events
    if packed.unknown_events != plain.unknown_events or packed.digest != plain.digest:
        raise Disagreement("unknown events or digests differ")
    if packed.event_count != len(mine) or (mine != plain.events and repr(mine) != repr(plain.events)):
        raise Disagreement(f"events differ: {mine!r:.300} and {plain.events!r:.300}")


class Fuzz:
    """One index for all inputs; with `against`, a pure one beside it that has to say the same."""

    def __init__(self, with_pure: bool) -> None:
        makers = available_indexes()
        self.figures = Figures()
        self._decode = make_packed_decoder()
        self._index = makers[COMPILED](SEED, LIMITS)
        self._pure = makers[PURE](SEED, LIMITS) if with_pure else None
        for index in self._indexes():
            for endpoint in ENDPOINTS:
                index.add_endpoint(endpoint)

    def _indexes(self) -> list[PrefixIndex]:
        return [self._index] if self._pure is None else [self._index, self._pure]

    def feed(self, payload: bytes) -> None:
        """Raises Disagreement or IndexCorrupt."""
        figures = self.figures
        figures.inputs += 1
        packed, plain = verdict(self._decode, payload), verdict(decode_batch, payload)
        require_same(packed, plain)
        if isinstance(packed, str) or isinstance(plain, str):
            return
        figures.accepted += 1
        others = len(getattr(packed, "others", ()))
        figures.other_events += others
        figures.packed_events += packed.event_count + packed.unknown_events - others
        endpoint = ENDPOINTS[packed.digest % len(ENDPOINTS)]
        applied = self._index.apply_batch(endpoint, packed)
        if self._pure is not None and self._pure.apply_batch(endpoint, plain) != applied:
            raise Disagreement("the indexes count differently")
        figures.stored_blocks += applied.stored_blocks
        figures.removed_blocks += applied.removed_blocks
        figures.windowed_blocks += applied.windowed_blocks

        if figures.inputs % LOOK_UP_EVERY == 0:
            self._look_up()

    def _look_up(self) -> None:
        """Raises Disagreement."""
        found = [self._index.depths(prompt, ENDPOINTS) for prompt in PROMPTS]
        self.figures.found_blocks += sum([d.blocks for depths in found for d in depths.values()])
        if self._pure is not None and found != [self._pure.depths(prompt, ENDPOINTS) for prompt in PROMPTS]:
            raise Disagreement("the indexes find different depths")

    def check(self) -> None:
        """Raises Disagreement or IndexCorrupt."""
        self.figures.checks += 1
        for index in self._indexes():
            index.check_integrity()
        if self._pure is not None:
            for endpoint in ENDPOINTS:
                if self._index.stats(endpoint) != self._pure.stats(endpoint):
                    raise Disagreement("the indexes hold different things")

    def renew(self, number: int) -> None:
        """An endpoint leaves and comes back."""
        for index in self._indexes():
            index.add_endpoint(ENDPOINTS[number % len(ENDPOINTS)])

    def drain(self) -> None:
        """Raises Disagreement if anything is left after everybody has gone."""
        for index in self._indexes():
            for endpoint in ENDPOINTS:
                index.remove_endpoint(endpoint)
            while index.sweep(1_000):
                pass
            index.check_integrity()
            if not isinstance(index, PythonPrefixIndex) or len(index):
                raise Disagreement("blocks are left in an empty index")


def made_elsewhere(inputs: int, seed: int) -> Iterator[bytes]:
    """From a process without the memory checks of this one: making an input costs more than reading it."""
    command = [sys.executable, "-m", "benchmarks.event_inputs", str(seed), str(inputs)]
    plain = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "PYTHONMALLOC")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=plain) as maker:
        assert maker.stdout is not None
        for _ in range(inputs):
            length = int.from_bytes(maker.stdout.read(LENGTH_BYTES), "little")
            yield maker.stdout.read(length)


def run(inputs: int, seed: int) -> Figures:
    """Raises Disagreement, IndexCorrupt, or MemoryError if memory grows."""
    fuzz, started_s = Fuzz(with_pure=False), time.monotonic()
    figures = fuzz.figures
    for number, payload in enumerate(made_elsewhere(inputs, seed), 1):
        try:
            fuzz.feed(payload)
            if number % CHECK_EVERY == 0:
                fuzz.check()
            if number % (20 * CHECK_EVERY) == 0:
                fuzz.renew(number // (20 * CHECK_EVERY))
        except Exception:
            print(f"input {number} of seed {seed}: {payload.hex()}")
            raise
        if number == inputs // 10:
            figures.resident_after_tenth_mib = resident_bytes() / 2**20
        if number % max(1, inputs // 100) == 0:
            rate = number / (time.monotonic() - started_s)
            counts = f"{number:,} inputs, {figures.accepted:,} accepted"
            print(f"{counts}, {rate:,.0f}/s, {resident_bytes() >> 20} MiB", flush=True)
    fuzz.check()
    fuzz.drain()
    figures.resident_at_end_mib = resident_bytes() / 2**20
    if figures.resident_at_end_mib - figures.resident_after_tenth_mib > MAX_GROWTH_BYTES / 2**20:
        raise MemoryError(f"memory grew: {figures}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    try:
        figures = run(arguments.inputs, arguments.seed)
    except (AssertionError, MemoryError, RuntimeError) as error:
        print(f"FAULT {type(error).__name__}: {error}")
        sys.exit(1)
    print(json.dumps({key: round(value, 1) for key, value in asdict(figures).items()}))


if __name__ == "__main__":
    main()
