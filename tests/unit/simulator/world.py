"""Small fleets for the simulator's tests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from epp.config import parse_config
from epp.engine_model.profile import ModelProfile, TransferTiming
from epp.engine_model.timing import PRESETS
from simulator.engine import EngineShape
from simulator.fleet import Fleet, FleetShape
from simulator.prompts import Content, random_tokens
from simulator.requests import Record

PROFILE = ModelProfile(
    "gpt-oss-120b",
    41_500,
    PRESETS["gpt-oss-120b"],
    TransferTiming(floor_s=0.02, stream_bytes_per_s=10e9, session_s=6.0, restore_floor_s=0.008),
)
SMALL = EngineShape(block_tokens=64, device_tokens=200_000, cpu_tokens=400_000)

LOAD_FIRST = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: precise-prefix-cache-producer
  - type: queue-scorer
  - type: active-request-scorer
  - type: max-score-picker
  - type: single-profile-handler
  - type: p2p-source-producer
    parameters:
      prefixMatchInfoProducerName: precise-prefix-cache-producer
      minCachedTokenDelta: 2048
schedulingProfiles:
  - name: default
    plugins:
      - pluginRef: queue-scorer
        weight: 1
      - pluginRef: active-request-scorer
        weight: 3
      - pluginRef: max-score-picker
"""
AFFINITY = LOAD_FIRST.replace(
    "  - type: queue-scorer\n", "  - type: prefix-cache-scorer\n  - type: queue-scorer\n"
).replace(
    "      - pluginRef: queue-scorer\n",
    "      - pluginRef: prefix-cache-scorer\n        weight: 9\n      - pluginRef: queue-scorer\n",
)


def fleet(config: str = LOAD_FIRST, engines: int = 2, seed: int = 0, **changes: Any) -> Fleet:
    shape = replace(FleetShape(engines=engines, shape=SMALL, gateway_s=0.0), **changes)
    return Fleet(shape, PROFILE, parse_config(config, "test"), seed=seed)


def text(number: int, tokens: int) -> Content:
    """The same number, the same leading tokens, whatever the length."""
    rng = random.Random(number)
    whole = random_tokens(rng, 100_000)
    return Content.of(whole[:tokens], SMALL.block_tokens)


def ask(fleet: Fleet, content: Content, output_tokens: int = 8, at_s: float | None = None) -> Record:
    """Send a prompt now (or at a time) and run until everything has ended."""
    found: list[Record] = []

    def send() -> None:
        found.append(fleet.submit(content, len(content.tokens) - output_tokens, output_tokens))

    fleet.timeline.at(fleet.timeline.now_s if at_s is None else at_s, send)
    fleet.run()
    return found[0]
