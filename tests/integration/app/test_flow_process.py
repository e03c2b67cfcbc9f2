"""Flow control in the picker's process, over real gRPC: a request waits for room, and a full queue is 429."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.integration.app.test_picker_process import CONFIG, Picker, picker_process, until, write_thresholds
from tests.integration.extproc import client as gateway

FLOW = (
    CONFIG
    + """
featureGates: [flowControl]
flowControl:
  defaultPriorityBand: {maxRequests: 1}
  saturationDetector: {pluginRef: one-at-a-time}
"""
)
DETECTOR = "- {type: concurrency-detector, name: one-at-a-time, parameters: {maxConcurrency: 1}}\n"
ROWS = [{"pod": "a", "host": "127.0.0.1", "serving_port": 9, "replay_port": 0}]
QUEUE = 'llm_d_epp_flow_control_queue_size{inference_pool="",priority="0"}'
ENDED = 'llm_d_epp_flow_control_requests_total{inference_pool="",outcome="%s",priority="0"}'


async def refused(picker: Picker) -> tuple[int, str]:
    """Status and reason of a request that does not get in."""
    stream = gateway.open_stream(picker.channel)
    await stream.write(gateway.headers(("content-type", "application/json")))
    await stream.write(gateway.body(json.dumps({"model": "m", "prompt": [1]}).encode(), end=True))
    answer = (await stream.read()).immediate_response
    fields = {h.header.key: h.header.raw_value.decode() for h in answer.headers.set_headers}
    return answer.status.code, fields["x-llm-d-request-dropped-reason"]


@pytest.mark.timeout(120)
async def test_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "thresholds").mkdir()
    write_thresholds(tmp_path / "thresholds" / "pull.yaml", "{enabled: false}")
    config = FLOW.replace("plugins:\n", "plugins:\n" + DETECTOR, 1)
    async with picker_process(tmp_path, ROWS, config=config) as picker:
        first = await picker.ask([1], "first")
        second = asyncio.create_task(picker.ask([1], "second"))

        async def waits() -> bool:
            return await picker.metric(QUEUE) == 1

        await until(waits)
        assert await refused(picker) == (429, "rejected-saturated")
        assert await picker.debug("decisions/second") is None, "it waits, and is decided afterwards"
        await first.end()
        await (await second).end()
        assert await picker.metric(QUEUE) == 0
        assert await picker.metric(ENDED % "dispatched") == 2
        assert await picker.metric(ENDED % "rejected-saturated") == 1
