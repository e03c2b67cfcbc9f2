"""No value may be better than the hardware."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epp.engine_model.profile import ImpossibleProfile, ModelProfile, TransferTiming
from epp.engine_model.timing import PRESETS

TRANSFER = TransferTiming(floor_s=0.01, stream_bytes_per_s=10e9)


def test_a_stream_faster_than_the_adapter_is_refused() -> None:
    with pytest.raises(ImpossibleProfile, match="stream_bytes_per_s"):
        ModelProfile("m", 41_500, PRESETS["gpt-oss-120b"], replace(TRANSFER, stream_bytes_per_s=51e9))


def test_decode_that_reads_faster_than_device_memory_is_refused() -> None:
    fast = replace(PRESETS["llama-3.1-8b"], decode_context_ns=23.0)  # 5.7 TB/s
    with pytest.raises(ImpossibleProfile, match="decode_context_ns"):
        ModelProfile("m", 131_072, fast, TRANSFER)


def test_experts_that_are_read_faster_than_device_memory_are_refused() -> None:
    timing = PRESETS["gpt-oss-120b"]
    ModelProfile("m", 41_500, timing, TRANSFER, expert_bytes=476e6)  # 4.0 TB/s
    with pytest.raises(ImpossibleProfile, match="expert_ms"):
        ModelProfile("m", 41_500, replace(timing, expert_ms=0.09), TRANSFER, expert_bytes=476e6)


@pytest.mark.parametrize(
    ("name", "kv_bytes"), [("gpt-oss-120b", 41_500), ("llama-3.1-8b", 131_072), ("glm-5.2", 92_600)]
)
def test_the_presets_are_possible(name: str, kv_bytes: int) -> None:
    ModelProfile(name, kv_bytes, PRESETS[name], TRANSFER)
