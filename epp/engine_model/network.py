"""Links between endpoints, shared fairly: how long transfers take when they meet.

Every endpoint has an egress and an ingress link; a transfer crosses one of each and has a limit of its own
(what one stream reaches on an idle pair). Rates are max-min fair and change only when a transfer begins
or ends. Pure: `now_s` is an argument, and the owner asks when the next transfer ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

_DONE_BYTES = 1e-3  # rounding of bytes over days of virtual time


@dataclass(eq=False, slots=True)
class Flow:
    """One transfer. `left_bytes` is as of the network's last change."""

    source: Hashable
    destination: Hashable
    total_bytes: float
    limit_bytes_per_s: float
    left_bytes: float = field(init=False)
    rate_bytes_per_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.left_bytes = float(self.total_bytes)


class FairNetwork:
    """All transfers in progress. `link_bytes_per_s` bounds each endpoint's egress, and its ingress."""

    def __init__(self, link_bytes_per_s: float) -> None:
        if link_bytes_per_s <= 0:
            raise ValueError("a link needs a bandwidth")
        self._link_bytes_per_s = link_bytes_per_s
        self._flows: dict[Flow, None] = {}  # in the order they began
        self._now_s = 0.0
        self.moved_bytes = 0.0  # of all transfers, unfinished and cancelled ones included

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def flows(self) -> Iterable[Flow]:
        return self._flows.keys()

    def start(self, flow: Flow, now_s: float) -> None:
        """Mutates: the transfer begins; everybody's rate may change."""
        self._advance(now_s)
        self._flows[flow] = None
        self._share()

    def cancel(self, flow: Flow, now_s: float) -> None:
        """Mutates: the transfer ends short. Unknown or ended: nothing."""
        self._advance(now_s)
        if self._flows.pop(flow, flow) is None:
            self._share()

    def finish(self, now_s: float) -> list[Flow]:
        """Mutates: the transfers that are complete at `now_s`, in the order they began."""
        self._advance(now_s)
        done = [flow for flow in self._flows if flow.left_bytes <= _DONE_BYTES]
        for flow in done:
            del self._flows[flow]
        if done:
            self._share()
        return done

    def next_end_s(self) -> float | None:
        """When the next transfer ends, if nothing changes before."""
        ends = [flow.left_bytes / flow.rate_bytes_per_s for flow in self._flows]
        return self._now_s + max(0.0, min(ends)) if ends else None

    def _advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._now_s
        if elapsed_s < 0:
            raise ValueError("time runs forward only")
        for flow in self._flows:
            moved = min(flow.left_bytes, flow.rate_bytes_per_s * elapsed_s)
            flow.left_bytes -= moved
            if flow.left_bytes <= flow.rate_bytes_per_s * 1e-12 * max(1.0, now_s):
                moved, flow.left_bytes = moved + flow.left_bytes, 0.0  # a clock's last digit is not a byte
            self.moved_bytes += moved
        self._now_s = now_s

    def _share(self) -> None:
        """Max-min fair: fill the tightest link, fix its transfers, go on with the rest."""
        crossing: dict[tuple[str, Hashable], set[Flow]] = {}
        for flow in self._flows:
            crossing.setdefault(("out", flow.source), set()).add(flow)
            crossing.setdefault(("in", flow.destination), set()).add(flow)
        left = dict.fromkeys(crossing, self._link_bytes_per_s)
        open_flows = dict(self._flows)
        while open_flows:
            share = min(left[link] / len(flows) for link, flows in crossing.items() if flows)
            limited = [flow for flow in open_flows if flow.limit_bytes_per_s <= share]
            fixed = limited or [
                flow
                for flow in open_flows
                if any(left[link] / len(crossing[link]) <= share * (1 + 1e-12) for link in _links(flow))
            ]
            for flow in fixed:
                flow.rate_bytes_per_s = min(share, flow.limit_bytes_per_s)
                del open_flows[flow]
            for flow in fixed:
                for link in _links(flow):
                    left[link] = max(0.0, left[link] - flow.rate_bytes_per_s)
                    crossing[link].discard(flow)


def _links(flow: Flow) -> tuple[tuple[str, Hashable], tuple[str, Hashable]]:
    return ("out", flow.source), ("in", flow.destination)
