"""The fitted timing reproduces what was published, and chunking loses no token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.engine_model.timing import PRESETS, EngineTiming, PrefillChunk

GPT_OSS = PRESETS["gpt-oss-120b"]
PUBLISHED_RECOMPUTE_MS = {2048: 78, 8192: 250, 16_384: 510, 32_768: 1173, 49_152: 1988}


@pytest.mark.parametrize(("tokens", "published_ms"), PUBLISHED_RECOMPUTE_MS.items())
def test_gpt_oss_recompute_is_within_three_percent_of_the_published_table(
    tokens: int, published_ms: int
) -> None:
    assert GPT_OSS.recompute_ms(tokens) == pytest.approx(published_ms, rel=0.03)


@given(prompt=st.integers(0, 60_000), cached=st.integers(0, 60_000))
def test_chunks_cover_exactly_what_is_missing(prompt: int, cached: int) -> None:
    position = cached
    for chunk in GPT_OSS.chunks(prompt, cached):
        assert chunk.context_tokens == position
        assert 0 < chunk.new_tokens <= GPT_OSS.chunk_tokens
        position += chunk.new_tokens
    assert position == max(prompt, cached)


@given(prompt=st.integers(1, 60_000), cached=st.integers(0, 60_000), more=st.integers(1, 5000))
def test_more_cached_tokens_never_cost_more(prompt: int, cached: int, more: int) -> None:
    assert GPT_OSS.recompute_ms(prompt, cached + more) <= GPT_OSS.recompute_ms(prompt, cached)


@given(tokens=st.integers(2, 8192), context=st.integers(0, 50_000), data=st.data())
def test_variable_cost_of_a_prefill_does_not_depend_on_how_it_is_cut(
    tokens: int, context: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, tokens - 1))
    whole = GPT_OSS.prefill_ms(PrefillChunk(tokens, context))
    parts = GPT_OSS.prefill_ms(PrefillChunk(cut, context)) + GPT_OSS.prefill_ms(
        PrefillChunk(tokens - cut, context + cut)
    )
    assert parts == pytest.approx(whole)


def test_a_step_pays_its_fixed_part_once_and_decoding_shares_it() -> None:
    timing = EngineTiming(
        chunk_tokens=100,
        chunk_ms=10.0,
        token_us=1000.0,
        context_ns=0.0,
        decode_step_ms=4.0,
        decode_sequence_ms=0.5,
        decode_context_ns=1000.0,
    )
    assert timing.step_ms((), ()) == 0.0
    assert timing.step_ms((), (1000, 2000)) == pytest.approx(4.0 + 2 * 0.5 + 3.0)
    assert timing.step_ms((PrefillChunk(5, 0), PrefillChunk(7, 50)), ()) == pytest.approx(10.0 + 12.0)
    assert timing.step_ms((PrefillChunk(5, 0),), (0,)) == pytest.approx(10.0 + 5.0 + 0.5)


MIXTURE = EngineTiming(
    chunk_tokens=100,
    chunk_ms=10.0,
    token_us=0.0,
    context_ns=0.0,
    decode_step_ms=4.0,
    decode_sequence_ms=0.0,
    decode_context_ns=0.0,
    expert_ms=0.5,
    experts=16,
    experts_per_token=4,
)


def test_a_mixture_reads_each_chosen_expert_once_a_step() -> None:
    assert MIXTURE.experts_read(1) == pytest.approx(4.0)
    assert MIXTURE.experts_read(2) == pytest.approx(4.0 + 4.0 * 0.75)  # a quarter is there already
    assert MIXTURE.experts_read(1000) == pytest.approx(16.0)
    assert MIXTURE.step_ms((), (5, 5)) == pytest.approx(4.0 + 0.5 * 7.0)
    assert MIXTURE.step_ms((), (5, 5)) == pytest.approx(MIXTURE.decode_fixed_ms(2))


def test_beside_a_prefill_the_experts_are_read_already() -> None:
    assert MIXTURE.step_ms((PrefillChunk(5, 0),), (5, 5)) == pytest.approx(10.0)


def test_a_dense_model_reads_no_experts() -> None:
    assert PRESETS["llama-3.1-8b"].experts_read(8) == 0.0
