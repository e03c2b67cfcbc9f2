"""The mission's five situations in which nothing may be pulled, on one fleet, judged by the bytes that every
engine counts at its own end. A pull that must happen comes last, with the same meter: it is no blind one.

The demo shows the same with long documents and a busy owner: rows 1, 2, 6, 7 and its check "equal holders".
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest

from deploy.local.client import CHAT
from deploy.local.envoy import LAB_SUBSET_HEADER
from deploy.local.fleet import Fleet, running_fleet
from deploy.local.report import Reporter
from deploy.local.scenario.load import Load, busy
from deploy.local.scenario.observe import Observation, ask
from deploy.local.scenario.texts import Texts, chat, question
from deploy.local.scenario.world import DELTA_TOKENS, World
from deploy.local.waiting import until
from tests.fleet.small import LOAD_ANSWER_TOKENS, small_spec

_TOKENS = 2_304  # of the document: more than minCachedTokenDelta
_A, _B, _C = "engine-a", "engine-b", "engine-c"
_HELD = _TOKENS // 16 * 16
_QUIET = ("no_claim", "destination_unknown")

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(180)]


@dataclass(slots=True)
class _Run:
    """A fleet and what was seen on it, by situation."""

    world: World
    seen: dict[str, Observation] = field(default_factory=dict)

    @property
    def fleet(self) -> Fleet:
        return self.world.fleet

    async def ask(self, situation: str, *, at: str | None = None) -> None:
        """The same document with another question each time; `at`: the only destination allowed."""
        document = self.world.texts.document("negative controls", _TOKENS)
        body = chat([question(document, f"What about {situation}?")], max_tokens=2)
        client, headers = self.fleet.gateway, {}
        if at is not None:
            client = self.fleet.lab
            headers = {LAB_SUBSET_HEADER: self.fleet.engine_spec(at).address.serving}
        request_id = situation.replace(" ", "-")
        self.seen[situation] = await ask(self.fleet, body, request_id, client=client, headers=headers)

    async def also_held_by(self, pod: str) -> None:
        """Let `pod` compute the document too, asked on its own port."""
        document = self.world.texts.document("negative controls", _TOKENS)
        body = chat([question(document, "What about yourself?")], max_tokens=1)
        await self.fleet.engine_client(pod).stream(CHAT, body, request_id=f"own-{pod}")
        await self.world.until_known(pod, _TOKENS)

    async def lose_device_tier(self, pod: str) -> None:
        await self.fleet.engine(pod).reset_cache(cpu_tier_too=False)
        await until(
            f"the picker knows that {pod} holds the document in its CPU tier only",
            self.fleet.picker.endpoints,
            lambda rows: rows[pod].blocks_device == 0 < rows[pod].blocks_cpu,
        )

    async def restart_picker(self) -> None:
        """With replay held back: it knows nothing until `hear_again`."""
        await asyncio.gather(*(engine.faults(hold_replay=True) for engine in self.fleet.engines()))
        await self.fleet.stop_picker()
        await self.fleet.start_picker(self.fleet.spec.picker_config)

    async def hear_again(self) -> None:
        await asyncio.gather(*(engine.faults(hold_replay=False) for engine in self.fleet.engines()))
        await self.fleet.wait_live(self.fleet.spec.pods)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Observation]:
    """One run for all tests of the module; the fleet has stopped when they look."""

    async def run() -> dict[str, Observation]:
        spec = small_spec(tmp_path_factory.mktemp("controls"), "127.0.47", 5500)
        async with running_fleet(spec, lambda _: None) as fleet:
            assert (await fleet.picker.thresholds())["minCachedTokenDelta"] == DELTA_TOKENS
            run = _Run(World(fleet, Texts(spec.tokenizer), Reporter(), judge_ttft=False))
            await run.ask("never seen", at=_A)
            await run.world.until_known(_A, _TOKENS)
            await run.ask("seen again", at=_A)
            await run.ask("local hit")
            await run.lose_device_tier(_A)
            await run.ask("own CPU tier")
            await run.also_held_by(_B)
            await run.ask("a tie")
            await run.restart_picker()
            async with _busy(fleet, _A), _busy(fleet, _B):
                await run.ask("index restarted")
                await fleet.engine(_C).reset_cache(cpu_tier_too=True)
                await run.hear_again()
                await run.ask("positive control")
            return run.seen

    return asyncio.run(run())


def _busy(fleet: Fleet, pod: str) -> contextlib.AbstractAsyncContextManager[Load]:
    return busy(fleet, pod, waiting=4, answer_tokens=LOAD_ANSWER_TOKENS)


def _nothing_moved(seen: Observation) -> None:
    """No source named, and not one byte at either end of any engine."""
    assert seen.decision.source is None
    assert seen.computed.pull_reason is None, "the engine was told of a source"
    assert seen.computed.pulled_bytes == 0
    assert set(seen.moved.received.values()) == set(seen.moved.served.values()) == {0}
    assert seen.computed.computed_tokens == seen.computed.prompt_tokens - seen.computed.cached_tokens


def test_a_prefix_never_seen_is_computed_once_and_reused_later(seen: dict[str, Observation]) -> None:
    first, second = seen["never seen"], seen["seen again"]
    _nothing_moved(first)
    assert first.decision.reason == "no_holder"
    assert first.computed.cached_tokens == 0
    _nothing_moved(second)
    assert second.computed.device_hit_tokens >= _HELD
    assert second.computed.computed_tokens < first.computed.computed_tokens - _HELD + 64


def test_a_local_hit_moves_nothing(seen: dict[str, Observation]) -> None:
    """No hint says where: placement finds the holder, which is then the best holder itself."""
    hit = seen["local hit"]
    _nothing_moved(hit)
    assert (hit.decision.destination, hit.decision.reason) == (_A, "local_best")
    assert hit.computed.device_hit_tokens >= _HELD


def test_the_own_cpu_tier_is_restored_and_not_pulled(seen: dict[str, Observation]) -> None:
    restored = seen["own CPU tier"]
    _nothing_moved(restored)
    assert (restored.decision.destination, restored.decision.reason) == (_A, "local_best")
    assert restored.computed.restored_tokens >= _HELD
    assert restored.computed.device_hit_tokens == 0


def test_holders_that_tie_with_the_destination_stay_local(seen: dict[str, Observation]) -> None:
    tie = seen["a tie"]
    _nothing_moved(tie)
    assert tie.decision.destination in (_A, _B)
    assert tie.decision.reason in ("local_best", "below_delta")
    assert {pod for pod, _, _ in tie.decision.band} == {_A, _B}
    assert tie.computed.cached_tokens >= _HELD


def test_a_restarted_index_names_no_source_before_it_has_heard(seen: dict[str, Observation]) -> None:
    """A and B hold the document all the while, and are busy: what it would have to be pulled for."""
    quiet = seen["index restarted"]
    _nothing_moved(quiet)
    assert quiet.decision.destination == _C
    assert quiet.decision.reason in _QUIET
    assert quiet.computed.cached_tokens == 0


def test_the_same_meter_sees_a_pull(seen: dict[str, Observation]) -> None:
    """As "index restarted", once the picker has heard."""
    pull = seen["positive control"]
    assert pull.decision.destination == _C
    assert pull.decision.source in (_A, _B)
    assert pull.computed.pulled_tokens == pull.decision.gain_tokens >= _HELD
    size = pull.computed.pulled_tokens * 2048
    assert pull.moved.received == {_A: 0, _B: 0, _C: size}
    assert pull.moved.served == {_A: 0, _B: 0, _C: 0} | {pull.decision.source: size}
