"""Turns between peers and rates, without a network."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from engine_plugin.transport.control.turns import NoRoom, Room, Ticket, TokenBucket, Turns


def turns(total: int = 4, each: int = 2, waiting: int = 100, size: int = 100) -> Turns:
    return Turns(total=Room(total, size), each=Room(each, size), waiting=waiting)


async def test_a_peer_that_asks_for_much_waits_behind_itself() -> None:
    gate = turns()
    greedy = [gate.request("greedy", 1) for _ in range(10)]
    modest = [gate.request("modest", 1) for _ in range(2)]
    assert [ticket.granted for ticket in greedy] == [True, True] + [False] * 8
    assert all(ticket.granted for ticket in modest)


async def test_peers_take_turns_for_what_all_share() -> None:
    gate = turns(total=1, each=1)
    first = gate.request("a", 1)
    waiting = {f"a{n}": gate.request("a", 1) for n in range(3)}
    waiting |= {f"b{n}": gate.request("b", 1) for n in range(3)}
    order: list[str] = []
    current: Ticket = first
    while waiting:
        gate.leave(current)
        (name,) = (name for name, ticket in waiting.items() if ticket.granted)
        order.append(name)
        current = waiting.pop(name)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


async def test_nobody_overtakes_a_large_request_whose_turn_it_is() -> None:
    gate = turns(total=10, each=10, size=10)
    small = [gate.request("small", 4) for _ in range(2)]
    large = gate.request("large", 10)
    turn = gate.request("small", 1)  # its peer stands before the large one, once
    late = gate.request("small", 1)
    assert (large.granted, turn.granted, late.granted) == (False, True, False)
    gate.leave(small[0])
    gate.leave(small[1])
    assert (large.granted, late.granted) == (False, False)
    gate.leave(turn)
    assert (large.granted, late.granted) == (True, False)
    gate.leave(large)
    assert late.granted


async def test_a_wait_is_bounded_and_leaves_no_trace() -> None:
    gate = turns(total=1)
    held = gate.request("a", 1)
    assert not await gate.wait(gate.request("b", 1), 0.0)
    cancelled = asyncio.create_task(gate.wait(gate.request("b", 1), 30.0))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    given_up = gate.request("b", 1)
    gate.leave(given_up)
    assert not await gate.wait(given_up, 30.0)
    gate.leave(held)
    assert gate.used == Room(0, 0)
    assert gate._peers == {}


async def test_what_can_never_fit_and_a_full_queue_are_refused_at_once() -> None:
    for gate, size, what in (
        (turns(total=0), 1, "count"),
        (turns(each=0), 1, "count"),
        (turns(), 101, "size"),
        (turns(total=1, waiting=0), 1, "waiting"),
    ):
        gate.request("other", 0) if what == "waiting" else None
        with pytest.raises(NoRoom) as caught:
            gate.request("a", size)
        assert caught.value.what == what
        assert "a" not in gate._peers or not gate._peers["a"].waiting


async def test_a_request_that_needs_less_than_it_asked_for_lets_others_in() -> None:
    gate = turns(size=10)
    first, second = gate.request("a", 10), gate.request("b", 5)
    gate.resize(first, 5)
    assert second.granted
    gate.leave(first)
    gate.leave(second)
    gate.leave(second)
    assert gate.used == Room(0, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_any_sequence_keeps_the_limits_and_ends_empty(seed: int) -> None:
    random, gate = Random(seed), turns(total=5, each=3, size=50)
    tickets: list[Ticket] = []
    for _ in range(500):
        if random.random() < 0.5:
            tickets.append(gate.request(random.choice("abcd"), random.randrange(40)))
        elif tickets:
            gate.leave(tickets.pop(random.randrange(len(tickets))))
        held = [ticket for ticket in tickets if ticket.granted]
        assert gate.used == Room(len(held), sum(ticket.size for ticket in held))
        assert len(held) <= 5
        assert sum(ticket.size for ticket in held) <= 50
        assert all(sum(ticket.peer == peer for ticket in held) <= 3 for peer in "abcd")
    while tickets:
        granted = [ticket for ticket in tickets if ticket.granted]
        assert granted, "somebody can always go on"
        gate.leave(granted[0])
        tickets.remove(granted[0])
    assert gate._peers == {}


def test_a_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(2.0, 3.0, now_s=0.0)
    assert [bucket.take(1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.full(0.5)
    assert [bucket.take(1, 0.5) for _ in range(2)] == [True, False]
    assert not bucket.take(4, 100.0), "more than the burst never fits"
    assert bucket.full(100.0)
