"""A real vLLM as a subprocess on loopback: started, awaited, and ended by its process group.

It runs in vLLM's own environment (.venv-vllm, made by requirements/vllm-setup.sh). The log is kept
and its end shown when the start fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from deploy.local.vllm.environment import PYTHON as PYTHON
from deploy.local.vllm.environment import environment

THREADS: Final = 2
START_TIMEOUT_S: Final = 600.0  # 40 s on an idle machine with two cores
STOP_TIMEOUT_S: Final = 60.0  # killed sooner, vLLM leaves its own shared memory behind (psm_*)
_LOG_TAIL_BYTES: Final = 4000


class EngineFailed(Exception):
    """vLLM did not come up; the message has the end of its log."""


class Process:
    """One subprocess with its whole group: an engine is several processes."""

    def __init__(self, arguments: Sequence[str], log: Path, more: Mapping[str, str] | None = None) -> None:
        """`more`: environment on top of what every vLLM here gets."""
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(PYTHON), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment(threads=THREADS), **(more or {})},
                cwd=log.parent,
                start_new_session=True,
            )

    def wait_ready(self, urls: Sequence[str], timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every URL answers 200. Raises `EngineFailed` when the process ends or the time is up."""
        deadline_s = time.monotonic() + timeout_s
        for url in urls:
            while not _answers(url):
                if self._process.poll() is not None:
                    raise EngineFailed(f"vLLM ended with {self._process.returncode}:\n{self.log_tail()}")
                if time.monotonic() > deadline_s:
                    raise EngineFailed(
                        f"vLLM did not answer {url} within {timeout_s:.0f} s:\n{self.log_tail()}"
                    )
                self._wait_moment()

    def _wait_moment(self) -> None:
        """A moment between two questions, cut short by the end of the process."""
        if self._process.poll() is not None:
            threading.Event().wait(0.05)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.25)

    def stop(self, *, politely: bool = True) -> None:
        """End the whole group: asked first unless not `politely`, killed at the deadline. The first process
        ends before the others have cleaned up, so all of them are waited for."""
        if politely and self._signal(signal.SIGTERM):
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            while self._signal(0) and time.monotonic() < deadline_s:
                self._wait_moment()
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, sign: int) -> bool:
        """To the group; False when nobody is left of it."""
        if self._process.poll() is not None:
            self._reap_orphans()
        try:
            os.killpg(self._process.pid, sign)
        except ProcessLookupError:
            return False
        return True

    def _reap_orphans(self) -> None:
        """Who has ended counts as one of the group until somebody waits for it: we do where the kernel hands
        us orphans (the local fleet's supervisor asks it to, in whichever process it has run)."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                pass

    @property
    def pid(self) -> int:
        """Of the first process; its group has the same number."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its first process is."""
        return self._process.poll() is None

    def log_tail(self) -> str:
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
