"""The picker's process takes a changed configuration while a stream is open, and says what is in force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.app.test_picker_process import (
    ANY_PORTS,
    CONFIG,
    TOKEN,
    picker_process,
    running_picker,
    until,
)
from tests.integration.engine.rig import TOKENIZER, prompt_ids

BOTH = """- {type: active-request-scorer}
- {type: max-score-picker, name: two, parameters: {maxNumOfEndpoints: 2}}
"""


def absent(pod: str, port: int) -> dict[str, Any]:
    """An endpoint where nobody listens: it is chosen by load like any other."""
    return {"pod": pod, "host": "127.0.0.1", "serving_port": port, "events_port": port + 1, "replay_port": 0}


@pytest.mark.timeout(240)
async def test_a_new_profile_without_a_restart(tmp_path: Path) -> None:
    (tmp_path / "thresholds").mkdir()
    rows = [absent("a", 9), absent("b", 19)]
    async with picker_process(tmp_path, rows) as picker:
        first = await picker.ask(prompt_ids(64), "first")
        assert "," not in first.destination
        changed = CONFIG.replace("- {type: active-request-scorer}\n", BOTH).replace(
            "{pluginRef: max-score-picker}", "{pluginRef: two}"
        )
        config = tmp_path / "config.yaml"
        config.write_text(changed)

        async def in_force() -> bool:
            return bool((await picker.debug("config"))["generation"] == 2)

        async def refused() -> bool:
            return bool((await picker.debug("config"))["rejected"])

        await until(in_force)
        said = await picker.debug("config")
        assert said["profiles"][0]["picker"] == "two"
        second = await picker.ask(prompt_ids(64), "second")
        assert len(second.destination.split(",")) == 2  # the fallback is new
        config.write_text(changed.replace("pluginRef: two", "pluginRef: three"))
        await until(refused)
        assert (
            "schedulingProfiles[0] (default): no plugin named 'three'"
            in ((await picker.debug("config"))["rejected"])
        )
        assert await picker.metric("kvpull_epp_config_rejected") == 1
        assert await picker.metric("kvpull_epp_config_generation") == 2
        for routed in (first, second):
            await routed.end()

        async def empty() -> bool:
            rows = await picker.debug("endpoints")
            return all(row["inflight"] == 0 for row in rows)

        await until(empty)


async def test_a_configuration_as_text_and_an_endpoint_of_ipv6(tmp_path: Path) -> None:
    row = absent("a", 9) | {"host": "2001:DB8:0::1"}
    (tmp_path / "endpoints.json").write_text(json.dumps({"endpoints": [row]}))
    (tmp_path / "token").write_text(TOKEN)
    arguments = ["--config-text", CONFIG, "--debug-token-file", str(tmp_path / "token"), *ANY_PORTS]
    arguments += ["--endpoints-file", str(tmp_path / "endpoints.json"), "--tokenizer", str(TOKENIZER)]
    async with running_picker(arguments) as picker:
        said = await picker.debug("config")
        assert (said["generation"], said["profiles"][0]["picker"]) == (1, "max-score-picker")
        routed = await picker.ask(prompt_ids(64), "r")
        assert routed.destination == "[2001:db8::1]:9"
        await routed.end()
