"""`kvpull calibrate` against a pair of emulated engines: real HTTP, real pulls over NIXL.

Times are not asserted: a test machine's are nobody's. What is: bytes at both ends, tokens, what is refused
and what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine_plugin import wire
from epp import cli
from epp.calibrate.fit import PULL, RECOMPUTE
from epp.calibrate.measure import CONTROL, Leg, Measured, Pair, Settings, plan
from epp.calibrate.probe import Engine, ProbeError, SourceName
from epp.core.pull_curves import PullCurve, RecomputeCurve
from epp.core.thresholds import EVERYWHERE
from epp.thresholds.document import parse_document
from sidecar.yaml_text import load_yaml
from tests.integration.engine.conftest import engines
from tests.integration.engine.rig import EngineClient

LENGTHS = (512, 1024, 2048, 4096)
KV_BYTES = 256


@contextlib.asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_TLS", "tcp")
    async with engines() as start:
        more = {"kv_bytes_per_token": KV_BYTES, "cpu_tokens": 131_072} | settings
        yield await start(**more), await start(**more)


def arguments(source: EngineClient, destination: EngineClient, *more: str) -> list[str]:
    return [
        *("calibrate", "--quiet", "--source", source.base, "--destination", destination.base),
        *("--lengths", ",".join(map(str, LENGTHS)), "--repetitions", "3", "--token-ids", "100-8000", *more),
    ]


async def moved(source: EngineClient, destination: EngineClient) -> tuple[int, int]:
    return (
        int(await source.counter(wire.PULL_SERVED_BYTES_TOTAL)),
        int(await destination.counter(wire.PULL_RECEIVED_BYTES_TOTAL)),
    )


async def test_every_pull_moves_the_prefix_and_nothing_else_moves() -> None:
    async with pair() as (source, destination):
        both = [Engine(e.base, model=None, timeout_s=30.0) for e in (source, destination)]
        settings = Settings(LENGTHS, 2, (100, 8000))
        measured = await asyncio.to_thread(Pair(*both, SourceName(*source.p2p), settings).run)
        counted = await moved(source, destination)
    warm_up_bytes = (LENGTHS[0] + LENGTHS[-1]) * KV_BYTES
    assert measured.moved_bytes == 2 * sum(LENGTHS) * KV_BYTES
    assert counted == (measured.moved_bytes + warm_up_bytes,) * 2
    assert (measured.verified, measured.bytes_per_token, measured.control_legs) == (True, KV_BYTES, 4)
    assert measured.discarded == []
    assert {n: len(v) for n, v in measured.samples[PULL].items()} == dict.fromkeys(LENGTHS, 2)
    # the control leg is one of them
    assert {n: len(v) for n, v in measured.samples[RECOMPUTE].items()} == dict.fromkeys(LENGTHS, 3)


async def test_command_writes_document_config_map_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The legs run; their times are replaced by those of known curves, so that no clock decides."""
    recompute, pull = RecomputeCurve(20.0, 40.0), PullCurve(60.0, 5.0)
    run = Pair.run

    def timed(self: Pair) -> Measured:
        measured = run(self)
        for leg, curve in ((RECOMPUTE, recompute), (PULL, pull)):
            measured.samples[leg] = {n: [curve.at_ms(n)] * len(v) for n, v in measured.samples[leg].items()}
        return measured

    monkeypatch.setattr(Pair, "run", timed)
    files = {name: tmp_path / f"out.{name}" for name in ("document", "config-map", "plot")}
    written = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    async with pair() as (source, destination):
        more = ("--json", "--margin", "0.5", "--name", "mine", *written)
        status = await asyncio.to_thread(cli.main, arguments(source, destination, *more))
    assert status == 0, capsys.readouterr().err
    said = json.loads(capsys.readouterr().out)
    assert said["crossover_tokens"] == pytest.approx(40.0 / 0.035)
    assert said["min_cached_token_delta"] == 1728  # 1,143 and a half, in whole blocks
    settings = parse_document(files["document"].read_text(), "d").rules[EVERYWHERE]
    assert settings.min_cached_token_delta == 1728
    assert settings.pull_seed == PullCurve(60.0, 5.0, KV_BYTES)
    assert settings.recompute_seed == recompute
    assert files["config-map"].stat().st_size < 4096  # what a container may leave as its termination message
    in_map = load_yaml(files["config-map"].read_text(), max_bytes=1 << 16)
    assert in_map["metadata"] == {"name": "mine"}
    assert in_map["data"]["thresholds.yaml"] == files["document"].read_text()
    assert files["plot"].read_bytes().startswith(b"\x89PNG\r\n")


async def test_pulls_that_are_never_cheaper_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Computing takes no time on these engines."""
    out = tmp_path / "thresholds.yaml"
    async with pair(kv_bytes_per_token=2048) as (source, destination):
        more = ("--document", str(out), "--max-noise", "100", "--lengths", "128,256,512,1024")
        status = await asyncio.to_thread(cli.main, arguments(source, destination, *more))
    assert (status, out.exists()) == (1, False)
    assert "kvpull: refused: " in capsys.readouterr().err


async def test_a_source_that_gives_nothing_is_not_counted_as_a_pull() -> None:
    """Named address of nobody: the destination computes, and that is no sample of a pull."""
    async with pair() as (source, destination):
        both = [Engine(e.base, model=None, timeout_s=30.0) for e in (source, destination)]
        nobody = SourceName("127.0.9.250", 7777)
        measured = await asyncio.to_thread(Pair(*both, nobody, Settings((128,), 1, (100, 8000))).run)
        assert await moved(source, destination) == (0, 0)
    assert measured.samples[PULL] == {128: []}
    assert measured.discarded == ["pull at 128 tokens: 0 bytes moved, 0 tokens were cached"]
    assert len(measured.samples[RECOMPUTE][128]) == 2


async def test_bytes_that_move_in_a_control_run_end_the_measurement() -> None:
    """A pair that moves blocks unasked (here: the named source is slipped in) measures nothing."""
    async with pair() as (source, destination):
        name = SourceName(*source.p2p)
        both = [Engine(e.base, model="m", timeout_s=30.0) for e in (source, destination)]
        complete = both[1].complete
        both[1].complete = lambda tokens, salt, _=None: complete(tokens, salt, name)  # type: ignore[method-assign]
        run = Pair(*both, name, Settings((128,), 1, (100, 8000))).run
        with pytest.raises(ProbeError, match=f"control at 128 tokens: {128 * KV_BYTES} bytes moved"):
            await asyncio.to_thread(run)


async def test_wrong_use_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    async with pair() as (source, destination):
        for more, status, said in (
            (("--lengths", "100,200"), 3, "multiples of the block size (16)"),
            (("--destination", source.base), 3, "source and destination are one engine"),
            (("--destination", "http://127.0.0.1:1"), 3, "http://127.0.0.1:1/metrics: "),
            (("--destination", "ftp://x"), 3, "expected http://host:port"),
        ):
            assert await asyncio.to_thread(cli.main, arguments(source, destination, *more)) == status
            assert said in capsys.readouterr().err


def test_order_is_interleaved_and_balanced() -> None:
    legs = plan(Settings((16, 32, 48, 64), 6, (1, 2)), random.Random(3))
    assert sorted(leg.tokens for leg in legs if leg.kind == CONTROL) == [16, 32, 48, 64]
    timed = [leg for leg in legs if leg.kind != CONTROL]
    pairs = list(zip(timed[::2], timed[1::2], strict=True))
    assert all(a.tokens == b.tokens and {a.kind, b.kind} == {RECOMPUTE, PULL} for a, b in pairs)
    assert sum(a.kind == PULL for a, _ in pairs) == len(pairs) // 2
    assert len({tuple(a.tokens for a, _ in pairs[i : i + 4]) for i in range(0, 24, 4)}) > 1
    assert timed.count(Leg(PULL, 48)) == 6
