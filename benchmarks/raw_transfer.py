"""A bare NIXL WRITE between two processes: what a transfer costs without any of our protocol.

The target is this module run as a child: it maps memory, makes progress only while a transfer is on, and
says nothing of ours. Initiator and target spin, as fast as NIXL goes on this machine.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Final

import numpy as np

from engine_plugin.pull_plan import Chunk, Segment
from engine_plugin.transport.mover.agent import Agent
from engine_plugin.transport.mover.link import environment

_DONE: Final = "done"
_OURS: Final = b"> "


def _memory(size: int) -> tuple[mmap.mmap, Any]:
    memory = mmap.mmap(-1, size)
    array: Any = np.frombuffer(memory, dtype=np.uint8)
    array[:] = 1
    return memory, array


class RawPair:
    """An initiator in this process and its target; use as a context manager."""

    def __init__(self, total_bytes: int) -> None:
        os.environ.update(environment(dict(os.environ)))
        self._memory, self._array = _memory(total_bytes)
        self._agent = Agent("raw-initiator", int(self._array.ctypes.data), total_bytes)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.raw_transfer", str(total_bytes), self._agent.metadata.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._heard = b""
        target = json.loads(self._line())
        self._base = int(target["base"])
        self._command("go")
        self._agent.add_peer("raw-target", bytes.fromhex(target["metadata"]))
        self._agent.notify("raw-target", _DONE)
        self._line()

    def __enter__(self) -> RawPair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def transfer_s(self, size: int, pieces: int = 1) -> float:
        """Write `size` bytes in `pieces` descriptors, neighbours or not: none of them touches the next."""
        part = size // pieces
        segments = tuple(Segment(at * part, (pieces - 1 - at) * part, part) for at in range(pieces))
        self._command("go")
        started_s = time.perf_counter()
        handle = self._agent.post("raw-target", Chunk(segments, size), self._base)
        while not self._agent.resolved("raw-target", handle):
            pass
        took_s = time.perf_counter() - started_s
        self._agent.notify("raw-target", _DONE)
        self._line()
        return took_s

    def _command(self, word: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{word}\n".encode())
        self._child.stdin.flush()
        assert self._line() == "spinning"

    def _line(self) -> str:
        """The child's next line to us; NIXL writes its log there, too."""
        assert self._child.stdout is not None
        fd = self._child.stdout.fileno()
        while True:
            line, ended, rest = self._heard.partition(b"\n")
            if ended:
                self._heard = rest
                if line.startswith(_OURS):
                    return line.removeprefix(_OURS).decode()
            elif select.select([fd], [], [], 0.0005)[0]:
                data = os.read(fd, 1 << 16)
                if not data:
                    raise RuntimeError("the raw target has ended")
                self._heard += data
            self._agent.arrivals()  # what was sent leaves only while its sender makes progress


def _say(line: str) -> None:
    sys.stdout.write(f"{_OURS.decode()}{line}\n")
    sys.stdout.flush()


def main() -> None:
    """The target: progress from each `go` until the initiator's notification."""
    total_bytes, initiator = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
    _kept, array = _memory(total_bytes)
    base = int(array.ctypes.data)
    agent = Agent("raw-target", base, total_bytes)
    agent.add_peer("raw-initiator", initiator)
    _say(json.dumps({"metadata": agent.metadata.hex(), "base": base}))
    for _ in sys.stdin:
        _say("spinning")
        while _DONE not in agent.arrivals():
            pass
        _say(_DONE)
    os._exit(0)


if __name__ == "__main__":
    main()
