"""A changed configuration: in force whole or not at all, last good kept, memory and requests kept."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from pathlib import Path

import pytest

from engine_plugin.identity import EndpointId
from epp.config import EppConfig, load_config, parse_config
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import Endpoint, Outcome, SchedulingDecision, SchedulingRequest
from epp.reload import ConfigReload

TEXT = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: approx-prefix-cache-producer}
- {type: no-hit-lru-scorer}
- {type: active-request-scorer}
- {type: label-selector-filter, parameters: {matchLabels: {pool: a}}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: label-selector-filter}
  - {pluginRef: no-hit-lru-scorer, weight: 1}
  - {pluginRef: active-request-scorer, weight: 0}
"""


class Rig:
    """A picker of two endpoints, one in each pool, and its configuration file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[EppConfig] = []
        config = load_config(path)
        self.picker = EndpointPicker(config.settings, CacheView(PythonPrefixIndex(bytes(16))))
        for number, pool in enumerate("aab"):
            endpoint = Endpoint(EndpointId(f"e{number}"), f"10.0.0.{number}", 8000, {"pool": pool})
            self.picker.upsert_endpoint(endpoint)
        self.reload = ConfigReload(path, config, self._apply, lambda: {})

    def _apply(self, config: EppConfig) -> None:
        self.seen.append(config)
        self.picker.apply(config.settings)

    async def write(self, text: str) -> str | None:
        self.path.write_text(text)
        await self.reload.refresh()
        return self.reload.state.rejected

    def ask(self, name: str) -> SchedulingDecision:
        request = SchedulingRequest(name, token_ids=list(range(sum(map(ord, name)), 2_000)))
        return self.picker.schedule(request, 0.0, name)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return Rig(path)


async def test_new_parameters_are_in_force_and_requests_in_flight_are_not_lost(rig: Rig) -> None:
    before = rig.ask("before")
    assert before.destination.labels["pool"] == "a"
    assert await rig.write(TEXT.replace("pool: a", "pool: b")) is None
    assert rig.reload.state.generation == 2
    assert rig.ask("after").destination.id.pod == "e2"
    assert rig.picker.ledger.load(before.destination.id).requests == 1
    rig.picker.first_token("before")
    assert rig.picker.release("before", Outcome(status=200, completed=True))
    assert rig.picker.ledger.load(before.destination.id).requests == 0
    rig.picker.ledger.check_integrity()


async def test_a_plugin_that_did_not_change_keeps_what_it_remembers(rig: Rig) -> None:
    first = rig.ask("first")
    assert await rig.write(TEXT.replace("weight: 1}", "weight: 5}")) is None
    others = {"e0", "e1"} - {first.destination.id.pod}
    assert {rig.ask("second").destination.id.pod} == others
    # negative control: with other parameters it is another plugin, and both are new to it
    scorer = "- {type: no-hit-lru-scorer, parameters: {lruSize: 7}}"
    assert await rig.write(TEXT.replace("- {type: no-hit-lru-scorer}", scorer)) is None
    parts = {s.candidate.endpoint.id.pod: dict(s.parts) for s in rig.ask("third").scored}
    assert [parts[pod]["no-hit-lru-scorer"] for pod in ("e0", "e1")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pluginRef: no-hit", "pluginRef: no-such", r"schedulingProfiles\[0\] \(default\): no plugin named"),
        ("weight: 1}", "weight: -1}", r"schedulingProfiles\.0\.plugins\.1\.weight"),
        ("kind:", "kind", "mapping|expected|YAML"),
        (
            "approx-prefix-cache-producer}",
            "approx-prefix-cache-producer, parameters: {lruCapacityPerServer: 5}}",
            r"needs a restart: plugins\.approx-prefix-cache-producer",
        ),
        ("plugins:\n- {type: a", "featureGates: [flowControl]\nplugins:\n- {type: a", "featureGates, flowC"),
    ],
)
async def test_what_is_refused_changes_nothing(
    rig: Rig, old: str, new: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    changed = TEXT.replace(old, new, 1)
    assert changed != TEXT
    rejected = await rig.write(changed)
    assert rejected is not None
    assert re.search(said, rejected)
    assert str(rig.path) in rejected
    assert rejected in caplog.text
    assert (rig.reload.state.generation, rig.seen) == (1, [])
    assert rig.ask("after").destination.labels["pool"] == "a"
    assert await rig.write(TEXT) is None  # back to the good one
    assert (rig.reload.state.generation, rig.seen) == (1, [])


async def test_a_refusal_is_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    await rig.write("kind: Pod")
    await rig.reload.refresh()
    await rig.reload.refresh()
    assert len(caplog.records) == 1


async def test_a_file_that_comes_back_is_good_again(rig: Rig) -> None:
    rig.path.unlink()
    await rig.reload.refresh()
    assert "cannot be read" in (rig.reload.state.rejected or "")
    assert await rig.write(TEXT) is None
    assert rig.reload.state.generation == 1


async def test_comments_and_order_of_keys_are_no_new_generation(rig: Rig) -> None:
    assert await rig.write(TEXT + "# a comment\n") is None
    assert (rig.reload.state.generation, rig.seen) == (1, [])


async def test_the_link_swap_of_a_mounted_config_map_is_seen(tmp_path: Path) -> None:
    """S-G05: the file's own inode never changes."""
    for name, text in (("one", TEXT), ("two", TEXT.replace("pool: a", "pool: b"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "config.yaml").symlink_to("..data/config.yaml")
    rig = Rig(tmp_path / "config.yaml")
    (tmp_path / "..new").symlink_to("two")
    os.rename(tmp_path / "..new", tmp_path / "..data")
    await rig.reload.refresh()
    assert rig.reload.state.generation == 2
    assert rig.ask("after").destination.id.pod == "e2"


async def test_a_fault_while_applying_is_shown_and_ends_nothing(rig: Rig) -> None:
    def broken(_config: EppConfig) -> None:
        raise RuntimeError("no")

    reload = ConfigReload(rig.path, load_config(rig.path), broken, lambda: {})
    rig.path.write_text(TEXT.replace("pool: a", "pool: b"))
    await reload.refresh()
    assert "fault of the picker: RuntimeError" in (reload.state.rejected or "")
    assert reload.state.generation == 1


async def test_without_a_file_nothing_is_reloaded() -> None:
    config = parse_config(TEXT)
    reload = ConfigReload(None, config, lambda _: pytest.fail("nothing has changed"))
    await reload.refresh()
    assert (reload.state.config, reload.state.rejected, reload.state.generation) == (config, None, 1)
    running = asyncio.create_task(reload.run())
    await asyncio.sleep(0)
    assert not running.done()  # a component that ends is a fault
    running.cancel()
