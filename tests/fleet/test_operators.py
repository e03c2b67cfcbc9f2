"""What an operator does to a running fleet: look at its health, change thresholds under load, ask why."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
from dataclasses import dataclass, field
from operator import ge
from typing import Any

import pytest

from deploy.local.client import CHAT, Answer
from deploy.local.fleet import Fleet, running_fleet
from deploy.local.report import Reporter
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import Observation, ask
from deploy.local.scenario.texts import Texts, chat, question
from deploy.local.scenario.world import World
from deploy.local.spec import ROOT
from deploy.local.waiting import until
from tests.fleet.pasted import paste
from tests.fleet.small import LOAD_ANSWER_TOKENS, captured, doctor, kvpull, small_spec

_DOCUMENT = ROOT / "docs" / "troubleshooting.md"
_SETTINGS = ((True, 512), (False, 512), (True, 1024), (False, 4096), (True, 2048))
_CLIENTS = 3
_ANSWERS_EACH = 4  # at least, under each setting
_PROMPT_TOKENS = 2_304
_QUEUE = 4

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(180)]


@dataclass(slots=True)
class _Seen:
    """What one run of the fleet showed."""

    healthy: int = -1
    health: str = ""
    with_wrong_key: int = -1
    wrong_key: str = ""
    answers: list[Answer] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[int, tuple[bool, int]] = field(default_factory=dict)  # by generation
    pulled: Observation | None = None
    explained: str = ""
    kv_bytes_per_token: int = 0
    commands: dict[str, tuple[int, str]] = field(default_factory=dict)  # exit status and what was said


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> _Seen:
    """One fleet for all tests of the module; it has stopped when they look."""

    async def run() -> _Seen:
        found = _Seen()
        spec = small_spec(tmp_path_factory.mktemp("operators"), "127.0.46", 5000)
        found.kv_bytes_per_token = spec.kv_bytes_per_token
        async with running_fleet(spec, lambda _: None) as fleet:
            await _change_thresholds_under_load(fleet, found)
            await _explain_a_pull(fleet, found)
            with captured() as text:
                found.healthy = await doctor(fleet)
            found.health = text.getvalue()
            wrong_key = spec.run_dir / "wrong-key"
            wrong_key.write_text("another key of enough bytes")
            with captured() as text:
                found.with_wrong_key = await doctor(fleet, key_file=wrong_key)
            found.wrong_key = text.getvalue()
            found.commands = await _run_documented_commands(fleet)
        return found

    return asyncio.run(run())


async def _change_thresholds_under_load(fleet: Fleet, seen: _Seen) -> None:
    """Every setting stays in force until each client has had some answers under it."""
    stop = asyncio.Event()
    counts = [0] * _CLIENTS

    async def client(number: int) -> None:
        for n in itertools.count():
            if stop.is_set():
                return
            body = chat([{"role": "user", "content": f"Is {number} more than {n}?"}], max_tokens=2)
            request_id = f"load-{number}-{n}"
            seen.answers.append(await fleet.gateway.stream(CHAT, body, request_id=request_id))
            counts[number] += 1

    async def now() -> list[int]:
        return counts

    async def operator() -> None:
        for enabled, delta in _SETTINGS:
            await fleet.set_thresholds(enabled=enabled, min_cached_token_delta=delta)
            generation = int((await fleet.picker.thresholds())["generation"])
            seen.settings[generation] = (enabled, delta)
            goals = [count + _ANSWERS_EACH for count in counts]
            await until(
                "every client has had answers under the setting",
                now,
                lambda seen, goals=goals: all(map(ge, seen, goals)),
                timeout_s=60.0,
            )
        stop.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(operator())
        for number in range(_CLIENTS):
            group.create_task(client(number))
    for answer in seen.answers:
        with captured() as text:
            assert await kvpull(fleet, "explain", answer.request_id, "--json") == 0
        seen.records.append(json.loads(text.getvalue()))


async def _explain_a_pull(fleet: Fleet, seen: _Seen) -> None:
    world = World(fleet, Texts(fleet.spec.tokenizer), Reporter(), judge_ttft=False)
    owner = fleet.spec.pods[0]
    prompt = [question(world.texts.document("a pull", _PROMPT_TOKENS), "What is this?")]
    held = (await fleet.picker.endpoints())[owner].blocks_cpu * world.block_size
    await fleet.engine_client(owner).stream(CHAT, chat(prompt, max_tokens=1), request_id="own")
    await world.until_known(owner, held + _PROMPT_TOKENS)
    async with busy(fleet, owner, waiting=_QUEUE, answer_tokens=LOAD_ANSWER_TOKENS):
        seen.pulled = await ask(fleet, chat(prompt, max_tokens=2), "pulled-1")
    with captured() as text:
        assert await kvpull(fleet, "explain", "pulled-1") == 0
    seen.explained = text.getvalue()


def documented_commands() -> list[str]:
    """Lines of the shell blocks of docs/troubleshooting.md."""
    blocks = re.findall(r"^```sh\n(.*?)^```", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


async def _run_documented_commands(fleet: Fleet) -> dict[str, tuple[int, str]]:
    """Each as a person would paste it, with the names that the document uses set."""
    control, engine = fleet.spec.addresses.control, fleet.engine_spec(fleet.spec.pods[0]).address
    names = {
        "PICKER": f"http://127.0.0.1:{control.metrics_port}",
        "GATEWAY": fleet.gateway_url,
        "TOKEN": str(fleet.debug_token_file),
        "ROUTING_KEY": str(fleet.routing_key_file),
        "ENDPOINT": f"http://{engine.serving}",
        "SIDECAR_URL": f"http://{engine.host}:{engine.sidecar_metrics_port}",
        "SIDECAR_METRICS": str(engine.sidecar_metrics_port),
        "THRESHOLDS": str(fleet.spec.run_dir / "thresholds" / "pull.yaml"),
        "REQUEST": "pulled-1",
    }
    return {line: await paste(line, environment=names) for line in documented_commands()}


@pytest.mark.parametrize("line", documented_commands())
def test_a_command_of_the_troubleshooting_page_works(seen: _Seen, line: str) -> None:
    if line.startswith("curl") and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    status, said = seen.commands[line]
    assert status == 0, said
    assert said.strip()


def test_a_good_fleet_is_healthy(seen: _Seen) -> None:
    rows = [line.split("  ") for line in seen.health.split("\n\n")[0].splitlines()]
    assert seen.healthy == 0
    assert len(rows) == 14
    bad = {row[0] for row in rows if "ok" not in [cell.strip() for cell in row]}
    assert bad <= {"shared memory"}, "that one is the machine's"


def test_a_key_that_is_not_the_sidecars_is_found(seen: _Seen) -> None:
    """Sidecars verify what the doctor signs: its pulls with the right key were no luck."""
    faults = [line for line in seen.wrong_key.splitlines() if line.startswith("FAULT")]
    assert seen.with_wrong_key == 1
    assert len(faults) == 3
    assert all("header through" in line and "signature_wrong" in line for line in faults)


def test_thresholds_change_under_load_without_a_dropped_request(seen: _Seen) -> None:
    """A request that is refused or cut short would have raised in the client."""
    assert len(seen.answers) >= len(_SETTINGS) * _CLIENTS * _ANSWERS_EACH
    assert all(answer.text and answer.completion_tokens == 2 for answer in seen.answers)
    assert list(seen.settings.values()) == list(_SETTINGS)


def test_every_record_names_the_generation_it_was_decided_under(seen: _Seen) -> None:
    assert len(seen.records) == len(seen.answers)
    for record in seen.records:
        generation = record["threshold_generation"]
        if generation not in seen.settings:  # the fleet's first content, before the first change
            assert generation < min(seen.settings)
            continue
        enabled, delta = seen.settings[generation]
        assert (record["reason"] == "switched_off") == (not enabled), record
        assert record["min_cached_token_delta"] == delta
    assert {record["threshold_generation"] for record in seen.records} >= seen.settings.keys()


def test_a_pull_is_explained_by_what_moved(seen: _Seen) -> None:
    pulled = seen.pulled
    assert pulled is not None
    tokens, size = pulled.computed.pulled_tokens, pulled.computed.pulled_tokens * seen.kv_bytes_per_token
    assert tokens == _PROMPT_TOKENS
    assert pulled.moved.received_bytes == pulled.moved.served_bytes == size
    assert f"decision {pulled.decision.decision_id} of request pulled-1" in seen.explained
    assert f"it can serve {pulled.decision.servable_tokens} tokens" in seen.explained
    assert f"pull: {tokens} of " in seen.explained
    assert f"({tokens} were promised), {size} bytes in" in seen.explained
