"""Calibrate, apply, pull: from `kvpull calibrate` on the fleet's own pair, under its default limits, to
bytes that a running picker moves because of the ConfigMap that was written.

The engines' times are declared (a step takes the model's time, a pull what `pull_paces` says) and several
times what the machine itself needs, so that what is measured is the fleet and not its neighbours. A result
that is too noisy is refused, as it should be; then an operator measures again, and so does this test.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deploy.local.client import CHAT
from deploy.local.fleet import Fleet, running_fleet
from deploy.local.report import Reporter
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import Observation, ask
from deploy.local.scenario.texts import Texts, chat, question
from deploy.local.scenario.world import World
from deploy.local.waiting import until
from epp import cli
from sidecar.yaml_text import load_yaml
from tests.fleet.small import captured, kvpull, small_spec

_A, _B = "engine-a", "engine-b"
_LENGTHS = (512, 1024, 2048, 4096)
_TIME_SCALE = 10.0  # computing takes 0.25 ms a token and 270 ms a step
_PACE = [300.0, 40e6]  # of a pull: 300 ms, then bytes a second, which is 0.05 ms a token
_ATTEMPTS = 4
_LOAD_TOKENS = 2_000

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


@dataclass(slots=True)
class _Seen:
    refused: int = 0
    status: int = -1
    said: dict[str, Any] = field(default_factory=dict)
    document: str = ""
    kv_bytes_per_token: int = 0
    below: Observation | None = None
    above: Observation | None = None
    explained: str = ""
    in_force: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> _Seen:
    async def run() -> _Seen:
        out = tmp_path_factory.mktemp("calibrate")
        spec = replace(small_spec(out, "127.0.48", 5400), time_scale=_TIME_SCALE)
        found = _Seen(kv_bytes_per_token=spec.kv_bytes_per_token)
        async with running_fleet(spec, lambda _: None) as fleet:
            await _calibrate(fleet, out, found)
            if found.status == 0:
                await _apply(fleet, out, found)
                await _pull(fleet, found)
        return found

    return asyncio.run(run())


async def _calibrate(fleet: Fleet, out: Path, seen: _Seen) -> None:
    """The command as an operator runs it, with its own limits."""
    source, urls = fleet.engine_spec(_A).address, [fleet.engine(pod).url for pod in (_A, _B)]
    await fleet.engine(_B).faults(pull_paces={f"{source.host}:{source.p2p_port}": _PACE})
    arguments = (
        *("calibrate", "--quiet", "--json", "--source", urls[0], "--destination", urls[1]),
        *("--lengths", ",".join(map(str, _LENGTHS)), "--repetitions", "3", "--max-repetitions", "7"),
        *("--config-map", str(out / "map.yaml"), "--token-ids", "100-8000"),
    )
    for _ in range(_ATTEMPTS):
        with captured() as text:
            seen.status = await asyncio.to_thread(cli.main, arguments)
        if seen.status != 1:
            break
        assert not (out / "map.yaml").exists(), "what is refused is not written"
        seen.refused += 1
    seen.said = json.loads(text.getvalue() or "{}")


async def _apply(fleet: Fleet, out: Path, seen: _Seen) -> None:
    """What a mounted ConfigMap comes to: its data as files of the directory."""
    for name, content in load_yaml((out / "map.yaml").read_text(), max_bytes=1 << 16)["data"].items():
        (fleet.spec.run_dir / "thresholds" / f"zz-{name}").write_text(content)
        seen.document = content
    seen.in_force = await until(
        "the picker applies what was calibrated",
        fleet.picker.thresholds,
        lambda now: now["minCachedTokenDelta"] == seen.said["min_cached_token_delta"],
    )


async def _pull(fleet: Fleet, seen: _Seen) -> None:
    """Two documents on a busy owner: one shorter than the calibrated threshold, one longer."""
    world = World(fleet, Texts(fleet.spec.tokenizer), Reporter(), judge_ttft=False)
    delta = int(seen.said["min_cached_token_delta"])
    await world.forget(fleet.spec.pods)
    held, prompts = 0, {}
    for name, tokens in (("below", delta - 16 * 8), ("above", delta + 16 * 8)):
        prompts[name] = [question(world.texts.document(name, tokens // 16 * 16), "What is this?")]
        await fleet.engine_client(_A).stream(
            CHAT, chat(prompts[name], max_tokens=1), request_id=f"own-{name}"
        )
        held += tokens // 16 * 16
        await world.until_known(_A, held)
    async with busy(fleet, _A, waiting=4, answer_tokens=_LOAD_TOKENS):
        seen.below = await ask(fleet, chat(prompts["below"], max_tokens=2), "below")
        seen.above = await ask(fleet, chat(prompts["above"], max_tokens=2), "above")
    with captured() as text:
        assert await kvpull(fleet, "explain", "above") == 0
    seen.explained = text.getvalue()


def test_the_pair_is_calibrated_under_the_default_limits(seen: _Seen) -> None:
    """The declared curves cross near 1,500 tokens; the threshold lies above, in whole blocks, in force."""
    assert seen.status == 0, f"refused {seen.refused} times"
    delta = seen.said["min_cached_token_delta"]
    assert delta % 16 == 0
    assert min(_LENGTHS) <= seen.said["crossover_tokens"] < delta <= 2 * max(_LENGTHS)
    assert f"minCachedTokenDelta: {delta}" in seen.document
    assert seen.in_force["minCachedTokenDelta"] == delta


def test_the_picker_pulls_above_the_calibrated_threshold_and_not_below(seen: _Seen) -> None:
    assert seen.below is not None
    assert seen.above is not None
    assert (seen.below.decision.reason, seen.below.moved.received_bytes) == ("below_delta", 0)
    assert seen.below.decision.destination != _A
    assert (seen.above.decision.reason, seen.above.decision.source) == ("pull", _A)
    size = seen.above.computed.pulled_tokens * seen.kv_bytes_per_token
    assert size > 0
    assert seen.above.moved.received_bytes == seen.above.moved.served[_A] == size
    assert seen.above.computed.pulled_tokens == seen.above.decision.gain_tokens
    assert f"minCachedTokenDelta {seen.said['min_cached_token_delta']}" in seen.explained
