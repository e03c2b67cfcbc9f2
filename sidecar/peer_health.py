"""Which peers to ask, by what became of earlier requests to them.

A prefiller fails in the open: its leg ends in an error. A source does not: an engine never fails a
request because of a pull, it recomputes, and a stock engine says nothing about the reason. What every
engine's answer does say, where its usage has the figure, is how many prompt tokens were cached. A pull
was asked for and *nothing* was cached: the source gave nothing. Anything was cached: the source is not
suspected (own cache and pulled tokens are not told apart). No figure (a stream without include_usage,
an engine without prompt token details): nothing is known, and nothing is remembered.
"""

from __future__ import annotations

import random
import time

from sidecar.plan import Peer
from sidecar.suspects import Part, Suspects
from sidecar.telemetry import Telemetry
from sidecar.usage import Usage


class PeerHealth:
    """Shared by all listeners of a process; `now_s` may be exchanged by tests."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._suspects = Suspects(random.random)
        self.now_s = time.monotonic

    def allows_pull(self, source: Peer) -> bool:
        """Whether to ask `source` now; a refusal is counted."""
        if not self._suspects.has(Part.SOURCE, source.serving, self.now_s()):
            return True
        self._telemetry.pull_skipped("source_suspected")
        return False

    def pull_ended(self, leg: str, source: Peer, usage: Usage | None) -> None:
        """An answer to a leg with a pull from `source`."""
        if usage is None:
            outcome = "unknown"
        elif usage.cached_tokens:
            outcome = "cached"
            self._suspects.succeeded(Part.SOURCE, source.serving)
        else:
            outcome = "nothing"
            self._failed(Part.SOURCE, source)
        self._telemetry.pull_ended(leg, outcome, usage.cached_tokens if usage is not None else 0)

    def usable_prefillers(self, prefillers: tuple[Peer, ...]) -> tuple[Peer, ...]:
        """Those that have not just failed, in their order."""
        now_s = self.now_s()
        return tuple(p for p in prefillers if not self._suspects.has(Part.PREFILLER, p.serving, now_s))

    def prefill_succeeded(self, prefiller: Peer) -> None:
        """Trust `prefiller` again."""
        self._suspects.succeeded(Part.PREFILLER, prefiller.serving)

    def prefill_failed(self, prefiller: Peer) -> None:
        """Leave `prefiller` alone for a while."""
        self._failed(Part.PREFILLER, prefiller)

    def _failed(self, part: Part, peer: Peer) -> None:
        self._suspects.failed(part, peer.serving, self.now_s())
        self._telemetry.suspected(part)
