"""Calibrate, apply, pull: from `kvpull calibrate` on the fleet's own pair, under its default limits, to
bytes that a running picker moves because of the ConfigMap that was written. The commands are those of
docs/calibration.md and docs/install.md, pasted; the cluster's part is our API server double's.

The engines' times are declared (a step takes the model's time, a pull what `pull_paces` says) and several
times what the machine itself needs, so that what is measured is the fleet and not its neighbours. A result
that is too noisy is refused, as it should be; then an operator measures again, and so does this test.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from deploy.local.client import CHAT
from deploy.local.fleet import Fleet, running_fleet
from deploy.local.report import Reporter
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import Observation, ask
from deploy.local.scenario.texts import Texts, chat, question
from deploy.local.scenario.world import World
from deploy.local.spec import ROOT
from deploy.local.waiting import until
from tests.fleet.pasted import Desk
from tests.fleet.small import captured, kvpull, small_spec
from tests.integration.kube import test_install_page
from tests.kube import kinds
from tests.kube.kubectl import tool_path
from tests.kube.server import KubeServer, kube_server

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
    commands: dict[str, tuple[int, str]] = field(default_factory=dict)  # exit status and what was said
    applied: dict[str, str] = field(default_factory=dict)  # data of the ConfigMap in the double
    written: str = ""  # the ConfigMap as the Job's pod would end with it
    plotted: bytes = b""
    token: str = ""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> _Seen:
    async def run() -> _Seen:
        out = tmp_path_factory.mktemp("calibrate")
        spec = replace(small_spec(out, "127.0.48", 5400), time_scale=_TIME_SCALE)
        found = _Seen(kv_bytes_per_token=spec.kv_bytes_per_token)
        async with (
            running_fleet(spec, lambda _: None) as fleet,
            kube_server() as kube,
            _desk(fleet, kube, out) as desk,
        ):
            found.commands = desk.said
            await _calibrate(fleet, desk, found)
            if found.status == 0:
                await _apply(fleet, kube, desk, found)
                await _pull(fleet, found)
                await _look(fleet, kube, desk, found)
        return found

    return asyncio.run(run())


def _line(page: list[str], begin: str) -> str:
    (line,) = [line for line in page if line.startswith(begin)]
    return line


def calibration_commands() -> list[str]:
    """Of docs/calibration.md."""
    block = re.findall(r"^```\n(kvpull.*?)^```", (ROOT / "docs" / "calibration.md").read_text(), re.M | re.S)[
        0
    ]
    return [line.partition("  #")[0].rstrip() for line in block.splitlines()]


def guide_commands() -> list[str]:
    """Of docs/install.md: those that need engines."""
    return [line for line in test_install_page.sh_commands() if not line.startswith("docker")]


def _desk(fleet: Fleet, kube: KubeServer, out: Path) -> Desk:
    """Where the pages' commands are pasted."""
    folder, tools = out / "desk", out / "bin"
    folder.mkdir()
    tools.mkdir()
    (tools / "kubectl").symlink_to(tool_path("kubectl"))
    engines = {
        pod: (fleet.engine_spec(pod).address.host, urlsplit(fleet.engine(pod).url).port or 0)
        for pod in (_A, _B)
    }
    urls = {pod: fleet.engine(pod).url for pod in engines}
    return Desk(
        folder,
        {
            "KUBECONFIG": str(kube.write_kubeconfig(out / "kubeconfig")),
            "PATH": f"{tools}:{os.environ['PATH']}",
        },
        {"http://10.0.0.1:8200": urls[_A], "http://10.0.0.2:8200": urls[_B], "REQUEST-ID": "above"},
        {
            ("pod/ENGINE-A", 8200): engines[_A],
            ("pod/ENGINE-B", 8200): engines[_B],
            ("service/kvpull-epp", 9090): ("127.0.0.1", fleet.spec.addresses.control.metrics_port),
        },
    )


async def _calibrate(fleet: Fleet, desk: Desk, seen: _Seen) -> None:
    """The commands as an operator runs them, with their own limits."""
    source = fleet.engine_spec(_A).address
    await fleet.engine(_B).faults(pull_paces={f"{source.host}:{source.p2p_port}": _PACE})
    line, written = _line(calibration_commands(), "kvpull calibrate"), desk.folder / "thresholds.yaml"
    small = ("--quiet", "--json", "--token-ids", "100-8000", "--lengths")
    for _ in range(_ATTEMPTS):
        lengths = (",".join(map(str, _LENGTHS)), "--repetitions", "3", "--max-repetitions", "7")
        seen.status, text = await desk.run(line, *small, *lengths)
        if seen.status != 1:
            break
        assert not written.exists(), "what is refused is not written"
        seen.refused += 1
    if seen.status != 0:
        return
    seen.said, seen.plotted = json.loads(text), (desk.folder / "crossover.png").read_bytes()
    for forward in guide_commands()[:2]:
        await desk.run(forward)
    kept = written.read_text()
    coarse = ("512,1024,2048,4096", "--repetitions", "3", "--max-repetitions", "3", "--max-noise", "9")
    for _ in range(_ATTEMPTS):
        if (await desk.run(_line(guide_commands(), "kvpull calibrate"), *small, *coarse))[0] == 0:
            break
    seen.written = written.read_text()
    written.write_text(kept)


async def _apply(fleet: Fleet, kube: KubeServer, desk: Desk, seen: _Seen) -> None:
    """By kubectl, and what a mounted ConfigMap comes to: its data as files of the directory."""
    await desk.run(_line(calibration_commands(), "kubectl apply"))
    seen.applied = kube.store.get(kinds.CONFIG_MAPS.key, "default", "kvpull-thresholds")["data"]
    for name, content in seen.applied.items():
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


async def _look(fleet: Fleet, kube: KubeServer, desk: Desk, seen: _Seen) -> None:
    """What the guide does afterwards: the Job's ConfigMap, the token, the picker through a forwarded port."""
    ended = {"terminated": {"exitCode": 0, "message": seen.written}}
    pod = {"name": "kvpull-calibrate-2-x", "labels": {"job-name": "kvpull-calibrate-2"}}
    kube.store.create(kinds.NAMESPACES.key, "", {"metadata": {"name": "llm"}})
    kube.store.create(
        kinds.PODS.key, "llm", {"metadata": pod, "status": {"containerStatuses": [{"state": ended}]}}
    )
    seen.token = fleet.debug_token_file.read_text().strip()
    (desk.folder / "token").write_text(seen.token)
    data = {"debug-token": base64.b64encode(seen.token.encode()).decode()}
    kube.store.create(("", "v1", "secrets"), "llm", {"metadata": {"name": "kvpull-keys"}, "data": data})
    for line in guide_commands():
        if line not in seen.commands:
            await desk.run(line)


@pytest.mark.parametrize("line", [*calibration_commands(), *guide_commands()])
def test_a_command_of_the_pages_works(seen: _Seen, line: str) -> None:
    status, said = seen.commands[line]
    assert status == 0, said


def test_what_the_commands_of_the_guide_say(seen: _Seen) -> None:
    """Each shows what it is there for."""
    said = {" ".join(line.split()[:2]): text for line, (_, text) in seen.commands.items()}
    assert seen.plotted.startswith(b"\x89PNG")
    assert "name: kvpull-epp-thresholds" in seen.written
    job, secret = (t for line, (_, t) in seen.commands.items() if line.startswith("kubectl get"))
    assert (job, base64.b64decode(secret).decode()) == (seen.written, seen.token)
    assert str(seen.said["min_cached_token_delta"]) in said["kvpull thresholds"]
    assert "pickers" in said["kvpull doctor"]
    assert said["kvpull explain"] == seen.explained


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
