"""`--index-max-bytes` bounds what the index of a whole picker takes; what does not fit is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.app.test_snapshots import LIVE, metrics_with, picker
from tests.integration.kvevents.conftest import new_engine as new_engine
from tests.integration.kvevents.rig import HOST, Engine, stored

MIB = 1 << 20
BATCHES, BLOCKS = 40, 1_000


def value(page: str, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


@pytest.mark.parametrize(("flags", "fits"), [(["--index-max-bytes", str(MIB)], False), ([], True)])
async def test_the_index_stays_within_the_bytes_it_was_given(
    new_engine: Callable[[], Engine], tmp_path: Path, flags: list[str], fits: bool
) -> None:
    engine = new_engine()
    row = {"pod": "engine-a", "host": HOST, "serving_port": 8000, "metrics_port": 1}
    row |= {"events_port": engine.events_port, "replay_port": engine.replay_port}
    endpoints = tmp_path / "endpoints.json"
    endpoints.write_text(json.dumps({"endpoints": [row]}))
    for batch in range(BATCHES):
        engine.keep(stored(batch * BLOCKS, BLOCKS))
    series = 'kvpull_epp_kv_events_total{endpoint="engine-a/0",outcome='
    async with picker(endpoints, *flags) as ready:
        page = await metrics_with(ready, LIVE, f'{series}"applied_batches"}} {float(BATCHES)}')
    held = value(page, f'{series}"stored_blocks"')
    refused = value(page, f'{series}"refused_blocks"')
    assert held > 0
    if fits:
        assert (held, refused) == (BATCHES * BLOCKS, 0)
        return
    assert refused > 0
    # what waits behind a refused block is bounded by itself: 16,384 blocks of 400 bytes and their tokens
    assert value(page, "kvpull_epp_index_bytes ") < MIB + MIB // 2
