"""Configurations of the kinds that people run load as they are, or are refused by the name of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.config import load_config
from epp.core.disagg import DisaggProfileHandler
from epp.core.errors import ConfigError
from epp.core.flow.bands import BandSettings, Fairness, Ordering
from epp.plugins.affinity_filter import PrefixCacheAffinityFilter
from epp.plugins.plugin_type import PLACED, TierWeights
from epp.plugins.registry import NOT_SUPPORTED, PLUGIN_TYPES
from epp.plugins.saturation import ConcurrencyDetector
from epp.plugins.scorers import TokenLoadScorer

CONFIGS = Path(__file__).parents[2] / "data" / "epp_configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_it_loads(path: Path) -> None:
    config = load_config(path)
    assert config.explanation is not None
    assert not any("has no effect" in note for note in config.notes)


@pytest.mark.parametrize("path", sorted((CONFIGS / "refused").glob("*.yaml")), ids=lambda p: p.stem)
def test_it_is_refused_by_the_name_of_the_plugin(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plugins\[\d\]: ([a-z-]+) is not part of kvpull: .{20}") as caught:
        load_config(path)
    named = str(caught.value).split(": ")[2].split()[0]
    assert named in NOT_SUPPORTED
    assert named in path.read_text()


def test_no_type_is_both_supported_and_refused() -> None:
    assert not PLUGIN_TYPES.keys() & NOT_SUPPORTED.keys()


def test_the_budget_of_the_affinity_filter_arrives() -> None:
    handler = load_config(CONFIGS / "disagg_budget.yaml").settings.handler
    assert isinstance(handler, DisaggProfileHandler)
    assert handler.prefill is not None
    affinity = handler.prefill.filters[1]
    assert isinstance(affinity, PrefixCacheAffinityFilter)
    assert (affinity.max_penalty_ms, affinity.peak_tokens_per_s) == (55_000.0, 5541.0)
    assert affinity.weights == TierWeights(1.0, 0.4)
    assert isinstance(handler.prefill.scorers[0][0], TokenLoadScorer)


def test_load_is_counted_by_placements_where_there_are_no_events() -> None:
    config = load_config(CONFIGS / "placements.yaml")
    assert config.settings.estimate.prefix is PLACED
    handler = config.settings.handler
    assert isinstance(handler, DisaggProfileHandler)
    assert handler.may_decode_alone


def test_bands_and_limits_arrive() -> None:
    config = load_config(CONFIGS / "queues.yaml")
    assert config.admission is not None
    assert isinstance(config.admission.detector, ConcurrencyDetector)
    flow = config.admission.flow
    assert flow is not None
    assert (flow.ttl_s, flow.no_endpoint_ttl_s) == (30.0, 5.0)
    assert (flow.max_bytes, flow.max_requests) == (2 << 30, 10_000)
    assert flow.default_band == BandSettings(fairness=Fairness.PROGRAM_AWARE, half_life_s=30.0)
    assert flow.default_negative_band == flow.default_band
    assert flow.bands == {10: BandSettings(max_requests=100, ordering=Ordering.SLO_DEADLINE)}
    assert config.settings.header_names >= {"x-session-id", "x-claude-code-session-id"}


def test_without_the_gate_nothing_is_queued(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = (CONFIGS / "queues.yaml").read_text().replace("[flowControl]", "[flowControl=false]")
    path.write_text(text)
    config = load_config(path)
    assert config.admission is not None
    assert config.admission.flow is None
    assert any("flowControl queues nothing" in note for note in config.notes)
