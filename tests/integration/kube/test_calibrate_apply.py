"""`kvpull calibrate --apply`: the real kubectl puts what was measured into a cluster, and the picker uses it.

What is measured is given here, so that no machine's noise decides; the measuring itself is tested in
tests/integration/calibrate.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from epp import cli
from epp.calibrate.fit import PULL, RECOMPUTE
from epp.calibrate.measure import Measured
from epp.core.thresholds import EVERYWHERE
from epp.ops import calibrate
from epp.thresholds.document import parse_document
from tests.integration.kube.test_config_maps import Start, delta_of, start
from tests.kube import kinds
from tests.kube.kubectl import Kubectl
from tests.kube.server import KubeServer

__all__ = ["start"]
LENGTHS = (1024, 2048, 4096, 8192)
COMMAND = ["calibrate", "--quiet", "--source", "http://a:1", "--destination", "http://b:1", "--apply"]
NAME = "pulls"  # the one that is watched


def measured(pull_floor_ms: float) -> Measured:
    """Recompute 0.1 ms a token, pull its floor and 0.02 ms a token; five equal runs each."""
    recompute = {tokens: [20.0 + 0.1 * tokens] * 5 for tokens in LENGTHS}
    pull = {tokens: [20.0 + pull_floor_ms + 0.02 * tokens] * 5 for tokens in LENGTHS}
    return Measured({RECOMPUTE: recompute, PULL: pull}, bytes_per_token=256.0, control_legs=4)


@pytest.fixture
def kubectl_on_path(kubectl: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "kubectl").symlink_to(kubectl.binary)
    for name, value in kubectl.environment().items():
        monkeypatch.setenv(name, f"{tools}:{value}" if name == "PATH" else value)
    return kubectl


async def test_what_is_applied_comes_into_force(
    kube: KubeServer, kubectl_on_path: Kubectl, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas = []
    async with start() as thresholds:
        await thresholds.choice.wait_settled()
        for floor_ms in (80.0, 240.0):
            monkeypatch.setattr(calibrate, "_measure", lambda _, floor_ms=floor_ms: (measured(floor_ms), 16))
            command = [*COMMAND, "--name", NAME, "--namespace", "default"]
            assert await asyncio.to_thread(cli.main, command) == 0
            data = kube.store.get(kinds.CONFIG_MAPS.key, "default", NAME)["data"]
            (text,) = data.values()
            settings = parse_document(text, "applied").rules[EVERYWHERE]
            await thresholds.until_delta(settings.min_cached_token_delta)
            deltas.append(delta_of(thresholds.log[-1]))
    assert deltas == [1264, 3760], "crossover at floor / 0.08 ms, a quarter more, in whole blocks"
    stored = json.loads(await kubectl_on_path.run("get", "cm", NAME, "-o", "json"))
    assert stored["data"] == data


NOBODY = """
{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}],
contexts: [{name: c, context: {cluster: c}}]}
"""


async def test_a_cluster_or_a_client_that_is_not_there_is_an_exit_status(
    kubectl_on_path: Kubectl, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "_measure", lambda _: (measured(80.0), 16))
    kubectl_on_path.kubeconfig.write_text(NOBODY)
    assert await asyncio.to_thread(cli.main, COMMAND) == 3
    assert "127.0.0.1:1" in capfd.readouterr().err
    monkeypatch.setenv("PATH", "/nonexistent")
    assert await asyncio.to_thread(cli.main, COMMAND) == 3
    # without kubectl it asks the server itself (tests/integration/kube/test_calibration_rights.py)
    assert "kvpull: --apply: get configmaps" in capfd.readouterr().err
