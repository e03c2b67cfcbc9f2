"""The director waits for room, sheds, and asks the engine for another model, as the cluster's objects say."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import pytest

from epp.core.errors import Saturated, WaitedTooLong
from epp.core.flow.bands import BandSettings, FlowSettings
from epp.core.model_rewrite import ModelRewrites, RewriteObject, RewriteRule, RewriteTarget
from epp.core.types import Outcome
from epp.extproc import wire
from epp.extproc.events import Routing
from epp.flow.controller import FlowController
from tests.unit.director.rig import BASE, Rig

SHORT = {"model": BASE, "prompt": "Hello"}
LONG = {"model": BASE, "prompt": "The cat sat on the mat and looked at it. " * 4000}  # tokenised in a thread
DONE = Outcome(status=200, completed=True, completion_tokens=3)


@dataclass
class Objects:
    """In place of the watch."""

    priorities: dict[str, int] = field(default_factory=dict)
    rewrites: ModelRewrites = field(default_factory=ModelRewrites)

    def priority(self, objective: str) -> int:
        return self.priorities.get(objective, 0)


OBJECTS = Objects({"batch": -1, "urgent": 5})


def objective(name: str) -> tuple[tuple[str, str], ...]:
    return ((wire.OBJECTIVE[0], name),)


async def fill(rig: Rig) -> list[Routing]:
    """As many as the pool may have."""
    return [await rig.route(SHORT) for _ in range(3)]


async def queued(rig: Rig, requests: int) -> None:
    assert isinstance(rig.admission, FlowController)
    async with asyncio.timeout(30):
        while len(rig.admission.queue) != requests:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def end(rig: Rig, routing: Routing) -> None:
    rig.director.finished(routing.token, DONE)


@pytest.mark.parametrize("fields", [SHORT, LONG], ids=["tokenised at once", "tokenised in a thread"])
async def test_a_request_waits_until_another_ends(fields: dict[str, str]) -> None:
    rig = Rig(flow=FlowSettings(), per_endpoint=1)
    running = await fill(rig)
    waiting = asyncio.create_task(rig.route(fields))
    await queued(rig, 1)
    assert len(rig.requests) == 3, "it is not scheduled, and books nothing"
    await end(rig, running[1])
    routing = await waiting
    assert routing.destination == running[1].destination, "the one that has room"
    await queued(rig, 0)


async def test_the_objective_in_the_header_decides_who_goes_first() -> None:
    rig = Rig(flow=FlowSettings(), per_endpoint=1, objectives=OBJECTS)
    running = await fill(rig)
    asks = {}
    for number, name in enumerate(("batch", "none", "urgent")):
        asks[name] = asyncio.create_task(rig.route(SHORT, headers=objective(name)))
        await queued(rig, number + 1)
    order = []
    for routing, name in zip(running, ("urgent", "none", "batch"), strict=True):
        await end(rig, routing)
        await asks[name]
        order.append([n for n, ask in asks.items() if ask.done()])
    assert [len(done) for done in order] == [1, 2, 3], "one place, one request"


async def test_without_flow_control_only_what_may_be_shed_is_refused() -> None:
    rig = Rig(per_endpoint=1, objectives=OBJECTS)
    await fill(rig)
    await rig.route(SHORT, headers=objective("urgent"))
    with pytest.raises(Saturated):
        await rig.route(SHORT, headers=objective("batch"))
    with pytest.raises(Saturated):
        await rig.route(LONG, headers=objective("batch"))
    assert rig.value('llm_d_epp_request_error_total{error_code="rejected-saturated"}') == 2


async def test_a_full_queue_and_its_time_are_429_and_counted() -> None:
    rig = Rig(flow=FlowSettings(ttl_s=0.0, default_band=BandSettings(max_requests=1)), per_endpoint=1)
    await fill(rig)
    with pytest.raises(WaitedTooLong):
        await rig.route(SHORT)
    rig = Rig(flow=FlowSettings(default_band=BandSettings(max_requests=0)), per_endpoint=1)
    await fill(rig)
    with pytest.raises(Saturated):
        await rig.route(SHORT)
    assert rig.value('llm_d_epp_request_error_total{error_code="rejected-saturated"}') == 1


async def test_a_client_that_leaves_the_queue_leaves_nothing() -> None:
    rig = Rig(flow=FlowSettings(), per_endpoint=1)
    running = await fill(rig)
    waiting = asyncio.create_task(rig.route(LONG))
    await queued(rig, 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await queued(rig, 0)
    for routing in running:
        await end(rig, routing)
    assert len(rig.pool.picker.ledger) == 0


# --- models that are rewritten ----------------------------------------------------------------------
async def test_a_flow_is_charged_for_its_prompt_and_twice_for_its_output() -> None:
    rig = Rig(flow=FlowSettings(), per_endpoint=10)
    charged: list[tuple[str, float]] = []
    rig.admission.note_served = lambda asking, tokens: charged.append((asking.flow, tokens))  # type: ignore[method-assign]
    await end(rig, await rig.route(SHORT, headers=((wire.FAIRNESS_ID[0], "team"),)))
    prompt = rig.requests[0].prompt_tokens
    assert prompt > 0
    assert charged == [("team", prompt + 2 * 3)]


def rewriting(*targets: str) -> Objects:
    rule = RewriteRule(("chat",), tuple(RewriteTarget(target) for target in targets))
    return Objects(rewrites=ModelRewrites([RewriteObject("canary", "", (rule,))]))


async def test_a_rule_exchanges_the_model_and_nothing_else() -> None:
    rig = Rig(objectives=rewriting(BASE))
    body = b'{ "prompt": "Hello",\n "model" : "chat", "x": 1.50 }'
    routing = await rig.route({}, body=body)
    assert routing.body == body.replace(b'"chat"', json.dumps(BASE).encode())
    assert routing.rename_model == (BASE, "chat")
    assert rig.requests[-1].model == BASE
    assert rig.requests[-1].lora_name is None, "matched as the base model that it is"
    assert "accept-encoding" in routing.remove_headers


async def test_the_clients_wish_wins_over_the_rule() -> None:
    rig = Rig(objectives=rewriting("other"))
    wish = ((wire.MODEL_NAME_REWRITE[0], BASE),)
    routing = await rig.route({"model": "chat", "prompt": "Hello"}, headers=wish)
    assert routing.rename_model == (BASE, "chat")


@pytest.mark.parametrize(("model", "targets"), [("else", ["x"]), ("chat", ["chat"])])
async def test_what_stays_as_it_is_is_forwarded_untouched(model: str, targets: list[str]) -> None:
    rig = Rig(objectives=rewriting(*targets))
    routing = await rig.route({"model": model, "prompt": "Hello"})
    assert routing.body is None
    assert routing.rename_model is None
