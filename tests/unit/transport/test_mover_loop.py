"""The mover's loop without NIXL: orders and arrivals in any order."""

from __future__ import annotations

from engine_plugin.transport.mover import messages
from engine_plugin.transport.mover.__main__ import (
    ACTIVE_POLL_MS,
    COOLING_POLL_MS,
    COOLING_S,
    IDLE_POLL_MS,
    MAX_EARLY,
    Mover,
)


class ScriptedLink:
    """The engine's end: hands out one list of orders a turn, then closes; keeps what it is told."""

    def __init__(self, turns: list[list[messages.AnyOrder]]) -> None:
        self._turns = turns
        self.sent: list[object] = []

    @property
    def closed(self) -> bool:
        return not self._turns

    def wait(self, _pause_ms: float) -> bool:
        return True

    def read(self) -> list[messages.AnyOrder]:
        return self._turns.pop(0)

    def send(self, report: object) -> None:
        self.sent.append(report)


class ScriptedAgent:
    """Notifications, one list a turn."""

    def __init__(self, turns: list[list[str]]) -> None:
        self._turns = turns

    def arrivals(self) -> list[str]:
        return self._turns.pop(0) if self._turns else []


class NoMoves:
    """Nothing to write."""

    active = False

    def step(self) -> bool:
        return False

    def cancel_all(self) -> None:
        """Nothing to cancel."""


def run(orders: list[list[messages.AnyOrder]], arrivals: list[list[str]]) -> list[object]:
    link = ScriptedLink(orders)
    Mover(link, ScriptedAgent(arrivals), NoMoves()).run()  # type: ignore[arg-type]
    return link.sent


def test_a_notification_is_reported_whichever_comes_first() -> None:
    """Seen: a move was over before the engine's Expect had come through; 14 of 1,000 small pulls."""
    assert run([[messages.Expect("a")], []], [[], ["a"]]) == [messages.Arrived("a")]
    assert run([[], [messages.Expect("a")], []], [["a"], []]) == [messages.Arrived("a")]


def test_it_is_reported_once_and_not_after_the_engine_has_let_go() -> None:
    again: list[list[messages.AnyOrder]] = [[], [messages.Expect("a")], [messages.Expect("a")], []]
    assert run(again, [["a"]]) == [messages.Arrived("a")]
    let_go: list[list[messages.AnyOrder]] = [[], [messages.Unexpect("a")], [messages.Expect("a")], []]
    assert run(let_go, [["a"]]) == []


def test_tags_that_nobody_ever_expects_are_bounded() -> None:
    flood = [f"t{n}" for n in range(MAX_EARLY + 1)]
    orders: list[list[messages.AnyOrder]] = [[], [messages.Expect("t0"), messages.Expect("t1")], []]
    assert run(orders, [flood]) == [messages.Arrived("t1")]


def test_an_idle_loop_sleeps_until_it_is_spoken_to() -> None:
    """Polling as when active would cost a tenth of a core, and all of one without pauses."""
    link = ScriptedLink([[messages.Wake()], []])
    mover = Mover(link, ScriptedAgent([]), NoMoves())  # type: ignore[arg-type]
    mover.run()
    active_s = mover._linger_until_s
    assert mover._pause_ms(active_s - 0.01, eager=0) == ACTIVE_POLL_MS
    assert mover._pause_ms(active_s + 0.01, eager=0) == COOLING_POLL_MS
    assert mover._pause_ms(active_s + COOLING_S, eager=0) == IDLE_POLL_MS >= 100
