"""A large row is taken over a little in every turn of the loop; nobody is heard before its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from engine_plugin.identity import EndpointId
from epp.core.adoption import AdoptionRefused, ExportedView
from epp.core.endpoint_picker import EndpointPicker
from epp.replicas import Replicas, ReplicaSettings
from epp.siblings.holding import HeldRows
from tests.unit.siblings.test_wire import row

A = EndpointId("pod-a", 3)


class Cache:
    """Of the picker only what an offer calls."""

    def __init__(self, refuses: bool = False) -> None:
        self.cache = self
        self.steps: list[int] = []
        self._refuses = refuses

    def adopt_steps(self, endpoint: EndpointId, exported: ExportedView, step_blocks: int) -> Iterator[int]:
        for step in range(3):
            self.steps.append(step)
            yield step
        if self._refuses:
            raise AdoptionRefused("duplicate")


class Offer:
    def __init__(self, cache: Cache, *, known: bool = True) -> None:
        self.replicas = Replicas(ReplicaSettings(), clock=lambda: 0.0)
        self.replicas._held = HeldRows([row()] if known else [], until_s=10.0)
        self.cache = cache
        self.done = 0

    def make(self) -> None:
        picker: EndpointPicker = self.cache  # type: ignore[assignment]
        self.replicas.offer(picker, A, "10.0.0.1", 5557, self.finish)

    def finish(self) -> None:
        self.done += 1


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("refuses", [False, True])
async def test_each_turn_takes_one_step_and_the_subscription_follows_the_last(refuses: bool) -> None:
    offer = Offer(Cache(refuses))
    offer.make()
    for step in range(1, 4):
        assert (len(offer.cache.steps), offer.done) == (step, 0)
        assert offer.replicas.is_adopting(A)
        await turns(1)
    assert (len(offer.cache.steps), offer.done) == (3, 1)
    assert not offer.replicas.is_adopting(A)
    assert dict(offer.replicas.facts().refused) == ({"duplicate": 1} if refuses else {})


async def test_without_a_row_the_subscription_follows_at_once() -> None:
    offer = Offer(Cache(), known=False)
    offer.make()
    assert (offer.cache.steps, offer.done) == ([], 1)


async def test_an_endpoint_that_leaves_meanwhile_is_not_subscribed_to() -> None:
    offer = Offer(Cache())
    offer.make()
    offer.replicas.withdraw(A)
    await turns(5)
    assert (offer.cache.steps, offer.done) == ([0], 0)
    offer.make()  # its row was for one use
    assert (offer.cache.steps, offer.done) == ([0], 1)
