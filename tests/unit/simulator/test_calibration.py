"""What is fitted, what it may be fitted to, and how well."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from epp.core.errors import ConfigError
from epp.engine_model.profile import MAX_NETWORK_BYTES_PER_S
from epp.engine_model.timing import PRESETS
from simulator.calibration import (
    ASSUMED,
    FITTED,
    PUBLISHED,
    STACK,
    Value,
    decode_values,
    fit_relative,
    load_model,
    model_names,
)
from simulator.crossover import crossover_table, decode_table

FITTED_MODELS = [name for name in model_names() if load_model(name).points]


@pytest.mark.parametrize("name", FITTED_MODELS)
def test_every_row_of_the_crossover_table_is_within_ten_percent(name: str) -> None:
    rows = crossover_table(load_model(name))
    assert len(rows) >= 4
    for row in rows:
        assert abs(row.recompute_error) <= 0.10, row
        assert abs(row.pull_error) <= 0.10, row


@pytest.mark.parametrize("name", FITTED_MODELS)
def test_the_emulated_engines_presets_are_this_calibration(name: str) -> None:
    fitted = asdict(load_model(name).profile.timing)
    assert asdict(PRESETS[name]) == pytest.approx(fitted, rel=1e-3)


def test_every_value_says_where_it_comes_from() -> None:
    for name in model_names():
        model = load_model(name)
        assert {v.origin for v in model.values} <= {FITTED, PUBLISHED, ASSUMED}
        assert all(v.source for v in model.values)
        assert model.profile.transfer.stream_bytes_per_s <= MAX_NETWORK_BYTES_PER_S
        by_name = {v.name: v for v in model.values}
        wanted = FITTED if model.points else ASSUMED
        assert by_name["chunk_ms"].origin == by_name["stream_bytes_per_s"].origin == wanted


def test_a_fit_finds_what_made_the_points_and_is_never_negative() -> None:
    rows = [(1.0, float(n)) for n in (1, 2, 4, 8)]
    assert fit_relative(rows, [3.0 + 2.0 * n for _, n in rows]) == pytest.approx([3.0, 2.0])
    assert fit_relative(rows, [2.0 * n - 0.5 for _, n in rows])[0] == 0.0


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"gpt-oss-120b.*llama-3\.1-8b"):
        load_model("gpt-5")


def test_decode_follows_the_table_of_one_endpoint_and_the_lone_stream_of_the_published_stack() -> None:
    model = load_model("gpt-oss-120b")
    timing, by_name = model.profile.timing, {v.name: v for v in model.values}
    rows = decode_table(model)
    assert len(rows) == 15
    for row in rows:
        assert abs(row.error) <= 0.12, row
        assert row.simulated_ms - row.alone_ms == pytest.approx(by_name[STACK].value)
    assert timing.step_ms((), (50_000,)) == pytest.approx(8.0)
    assert by_name["expert_ms"].origin == by_name["decode_step_ms"].origin == FITTED


def test_experts_explain_the_table_better_than_streams_alone() -> None:
    """The negative control: without experts the same fit is off by more at the ends."""
    model = load_model("gpt-oss-120b")
    given = {v.name: v for v in model.values}
    dense = given | {n: replace(given[n], value=0) for n in ("experts", "experts_per_token")}
    points = [(p.streams, p.context_tokens, p.token_ms) for p in model.decode_points]

    def worst(values: dict[str, Value]) -> float:
        found = {n: v.value for n, v in decode_values({"source": "t", "points": points}, values).items()}
        names = ("experts", "experts_per_token")
        timing = replace(model.profile.timing, **found, **{n: int(values[n].value) for n in names})
        return max(abs(timing.step_ms((), [context] * n) / ms - 1) for n, context, ms in points)

    assert worst(given) < 0.12 < 0.16 < worst(dense)
