"""LoRA adapters of a page: the newest series counts, and nonsense is unknown."""

from __future__ import annotations

import pytest

from epp.core.types import LoraState
from epp.endpoints.metrics_parser import parse_metrics


def page(*series: str) -> bytes:
    return "\n".join(["# TYPE vllm:lora_requests_info gauge", *series]).encode()


def row(running: str, waiting: str, value: str, most: str = "4") -> str:
    labels = f'max_lora="{most}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {value}"


def loras(*series: str) -> LoraState | None:
    return parse_metrics(page(*series), scraped_at_s=0.0).metrics.loras


def test_adapters_are_read() -> None:
    assert loras(row("a,b", "c", "1.7e9")) == LoraState(frozenset("ab"), frozenset("c"), 4)
    assert loras(row("", "", "1")) == LoraState(frozenset(), frozenset(), 4)


def test_the_newest_of_several_states_counts() -> None:
    assert loras(row("old", "", "5"), row("new", "", "9"), row("older", "", "1")) == LoraState(
        frozenset({"new"}), frozenset(), 4
    )


@pytest.mark.parametrize("series", [row("a", "", "NaN"), row("a", "", "1", most="many"), "other 1"])
def test_nonsense_is_unknown(series: str) -> None:
    assert loras(series) is None


def test_room() -> None:
    assert LoraState(frozenset("ab"), frozenset("c"), 4).has_room
    assert not LoraState(frozenset("ab"), frozenset("cd"), 4).has_room
