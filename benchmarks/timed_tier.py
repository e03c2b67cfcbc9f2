"""The pull tier with a watch on it: what its calls cost the scheduler thread. Loaded by an engine.

Every call of vLLM into the tier and into our cache policy is timed by the thread's own CPU clock; that is an
upper bound, for the policy's calls contain vLLM's own. The totals go to the file that `KVPULL_TIMES_FILE`
names, at most twice a second, outside the measured calls.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from engine_plugin.vllm.tier import PullTier

WRITE_S: Final = 0.5
_CALLS: Final = (
    "on_new_request",
    "lookup",
    "on_request_finished",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "on_schedule_end",
    "has_pending_work",
    "get_stats",
)
_POLICY_CALLS: Final = ("insert", "remove", "touch", "evict", "mark_evictable")


class TimedTier(PullTier):
    """Named by `type` and `module_path` in `secondary_tiers`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._spent_s = 0.0
        self._calls = 0
        self._depth = 0
        self._steps = 0
        self._written_s = time.monotonic()
        self._file = Path(os.environ["KVPULL_TIMES_FILE"])
        super().__init__(*arguments, **settings)
        for name in _CALLS:
            setattr(self, name, self._timed(getattr(self, name)))
        step = self.on_schedule_end

        def counted(context: Any) -> None:
            step(context)
            self._steps += 1
            if time.monotonic() - self._written_s >= WRITE_S:
                self._write()

        self.on_schedule_end = counted  # type: ignore[method-assign]

    def attach(self, primary: Any, wake: Callable[[], None] | None = None) -> None:
        super().attach(primary, wake)
        for name in _POLICY_CALLS:
            setattr(self._policy, name, self._timed(getattr(self._policy, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._depth:
                return call(*arguments, **named)
            self._depth = 1
            started_s = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self._spent_s += time.thread_time() - started_s
                self._calls += 1
                self._depth = 0

        return timed

    def _write(self) -> None:
        self._written_s = time.monotonic()
        told = {
            "tier_s": self._spent_s,
            "calls": self._calls,
            "steps": self._steps,
            "thread_s": time.thread_time(),
            "at_s": self._written_s,
        }
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(told))
        part.replace(self._file)
