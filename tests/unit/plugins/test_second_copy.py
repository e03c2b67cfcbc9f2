"""`kvpull-second-copy-filter`: a hot prefix of busy holders gets one more holder; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.errors import ConfigError
from epp.core.hot_prefixes import MAX_HEADS, HotPrefixes
from epp.core.types import SchedulingRequest
from tests.unit.core.test_endpoint_picker import BLOCK, BLOCKS, PROMPT, Pool

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-producer
  parameters: {{local: {{path: any}}}}
- type: precise-prefix-cache-producer
- type: p2p-source-producer
  parameters: {{minCachedTokenDelta: 100}}
- type: prefix-cache-scorer
- type: kvpull-second-copy-filter
  parameters: {parameters}
- type: max-score-picker
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins: [{{pluginRef: kvpull-second-copy-filter}}, {{pluginRef: prefix-cache-scorer}}]
"""
PARAMETERS = "{headTokens: 1024, hotRequests: 3, window: 30s, overloadRatio: 2.0}"
WINDOW_S = 30.0


def pool(parameters: str = PARAMETERS) -> Pool:
    made = Pool(parse_config(CONFIG.format(parameters=parameters)).settings)
    made.hold("b")
    return made


def warm(made: Pool, count: int = 3, **changed: Any) -> None:
    for n in range(count):
        decision = made.ask(f"warm-{n}", **changed)
        made.picker.release(decision.decision_id)


def load(made: Pool, pod: str, requests: int) -> None:
    endpoint = EndpointId(pod)
    for n in range(requests):
        made.picker.ledger.book(
            f"load-{pod}-{n}", serving=endpoint, computing=endpoint, source=None, uncached_prompt_tokens=0
        )


def where(made: Pool, request_id: str, now_s: float = 0.0, **changed: Any) -> tuple[str, str | None]:
    decision = made.ask(request_id, now_s, **changed)
    source = decision.kv_source
    return decision.destination.id.pod, source.id.pod if source else None


def test_a_hot_prefix_of_a_busy_holder_is_placed_elsewhere_and_pulled() -> None:
    made = pool()
    warm(made)
    load(made, "b", 3)
    pod, source = where(made, "hot")
    assert (pod in "ac", source) == (True, "b")
    second = where(made, "next")
    assert second == ("b", None), "two holders are enough: scorers decide again"


@pytest.mark.parametrize(
    ("warmed", "busy", "changed", "why"),
    [
        (2, 3, {}, "two requests are not hot"),
        (3, 0, {}, "nobody waits for the holder"),
        (3, 3, {"token_ids": PROMPT[:1000]}, "shorter than a head"),
        (3, 3, {"cache_salt": "another"}, "another salt is another prefix"),
        (3, 3, {"token_ids": None}, "tokens are not known"),
    ],
)
def test_otherwise_everybody_is_kept(warmed: int, busy: int, changed: dict[str, Any], why: str) -> None:
    made = pool()
    warm(made, warmed)
    load(made, "b", busy)
    decision = made.ask("r", **changed)
    assert len(decision.scored) == 3, why


def test_heat_is_forgotten() -> None:
    made = pool()
    warm(made, 4)
    load(made, "b", 3)
    late_s = 10 * WINDOW_S
    for pod in "abc":
        made.metrics(pod, waiting=0.0, at_s=late_s)
    assert where(made, "late", late_s) == ("b", None)


def test_where_a_pull_would_not_be_named_the_request_stays() -> None:
    """A copy that has to be computed is no gain: here the thresholds ask for more than there is."""
    parameters = PARAMETERS
    text = CONFIG.format(parameters=parameters).replace(
        "minCachedTokenDelta: 100", "minCachedTokenDelta: 9999"
    )
    made = Pool(parse_config(text).settings)
    made.hold("b")
    warm(made)
    load(made, "b", 5)
    assert where(made, "r") == ("b", None)


def test_a_third_copy_needs_to_be_allowed() -> None:
    made = pool(PARAMETERS.replace("}", ", maxCopies: 3}"))
    warm(made)
    load(made, "b", 9)
    first = where(made, "r1")
    load(made, first[0], 9)
    second = where(made, "r2")
    assert {first[0], second[0]} == {"a", "c"}
    assert second[1] == "b"


@pytest.mark.parametrize("wrong", ["{maxCopies: 1}", "{overloadRatio: 0.5}", "{window: 30}", "{hot: 1}"])
def test_wrong_parameters_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="kvpull-second-copy-filter"):
        parse_config(CONFIG.format(parameters=wrong))


# --- heat -----------------------------------------------------------------------------------------------
def head(prefixes: HotPrefixes, *tokens: int, **changed: Any) -> bytes | None:
    return prefixes.head_of(SchedulingRequest("r", "m", tokens, **changed))


def test_a_head_is_model_adapter_salt_and_the_first_tokens() -> None:
    prefixes = HotPrefixes(4, WINDOW_S)
    usual = head(prefixes, 1, 2, 3, 4, 5)
    assert usual is not None
    assert usual == head(prefixes, 1, 2, 3, 4, 6)
    others = [
        head(prefixes, 1, 2, 3, 5),
        head(prefixes, 1, 2, 3, 4, lora_name="l"),
        head(prefixes, 1, 2, 3, 4, cache_salt="l"),
        prefixes.head_of(SchedulingRequest("r", "n", (1, 2, 3, 4))),
    ]
    assert len({usual, *others}) == 5
    assert head(prefixes, 1, 2, 3) is None


def test_heads_are_bounded_and_the_oldest_goes() -> None:
    prefixes = HotPrefixes(1, WINDOW_S)
    for n in range(MAX_HEADS + 10):
        prefixes.add(n.to_bytes(4), 0.0)
    assert len(prefixes) == MAX_HEADS
    assert prefixes.heat((9).to_bytes(4), 0.0) == 0.0
    assert prefixes.heat((10).to_bytes(4), 0.0) == 1.0


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30), st.floats(0.0, 1_000.0))
def test_heat_is_at_most_the_requests_and_falls_with_time(gaps: list[float], later_s: float) -> None:
    prefixes, now_s = HotPrefixes(1, WINDOW_S), 0.0
    for gap_s in gaps:
        now_s += gap_s
        prefixes.add(b"h", now_s)
    now = prefixes.heat(b"h", now_s)
    assert 1.0 <= now <= len(gaps)
    assert prefixes.heat(b"h", now_s + later_s) <= now
    assert BLOCKS * BLOCK > 1024  # the prompts of this file have a head
