"""LoRA adapters of an engine, as vLLM's `vllm:lora_requests_info` has them: all facts are labels.

    vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.7e9

The value is when vLLM wrote the series; series of earlier states stay on the page, so the newest counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from epp.core.types import LoraState

MAX_ADAPTERS: Final = 1024


def read_lora_state(series: Iterable[tuple[Mapping[str, str], float | None]]) -> LoraState | None:
    """`series`: labels and value of each. None: there is none, or it cannot be read."""
    newest: tuple[float, LoraState] | None = None
    for labels, value in series:
        most = labels.get("max_lora", "")
        if value is None or not (most.isascii() and most.isdigit() and len(most) <= 6):
            continue
        if newest is None or value >= newest[0]:
            running = _names(labels.get("running_lora_adapters", ""))
            waiting = _names(labels.get("waiting_lora_adapters", ""))
            newest = value, LoraState(running, waiting, int(most))
    return None if newest is None else newest[1]


def _names(text: str) -> frozenset[str]:
    return frozenset(name for part in text.split(",")[:MAX_ADAPTERS] if (name := part.strip()))
