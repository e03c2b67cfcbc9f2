"""Golden figures: what published measurements and vLLM say a token of these models takes."""

from __future__ import annotations

from typing import Any

import pytest

from epp.sizing.kv_layout import ModelConfigError, read_layout

GLM = {
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "torch_dtype": "bfloat16",
}
QWEN_7B_AWQ = {
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "torch_dtype": "float16",
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
GPT_OSS_120B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "dtype", "tokens", "expected"),
    [
        (GLM, "auto", 24_576, 92_628),  # published: about 93 KB
        (GLM, "fp8_ds_mla", 24_576, 78 * 656 + 21 * 132),
        (QWEN_7B_AWQ, "auto", 10_000, 57_344),  # mission.md
        (LLAMA_8B, "auto", 16_384, 131_072),
        (LLAMA_8B, "fp8", 16_384, 65_536),
        (GPT_OSS_120B, "auto", 1_024, 41_472),  # published: 41.5 KB
        (GPT_OSS_120B, "auto", 128, 73_728),  # inside the window all layers keep everything
    ],
)
def test_bytes_of_a_token(config: dict[str, Any], dtype: str, tokens: int, expected: int) -> None:
    assert read_layout(config, kv_dtype=dtype).effective_bytes_per_token(tokens) == expected


def test_sizes_of_published_transfers() -> None:
    glm = read_layout(GLM)
    assert glm.sequence_bytes(24_576) / 2**30 == pytest.approx(2.1, abs=0.05)
    assert glm.sequence_bytes(70_000) / 2**30 == pytest.approx(6.2, abs=0.2)


@pytest.mark.parametrize(
    ("config", "tp", "times"),
    [(LLAMA_8B, 8, 1), (LLAMA_8B, 16, 2), (QWEN_7B_AWQ, 8, 2), (GLM, 4, 4)],
)
def test_ranks_repeat_what_they_cannot_split(config: dict[str, Any], tp: int, times: int) -> None:
    """Eight KV heads on 16 ranks are kept twice, latent vectors on every rank."""
    one, many = read_layout(config), read_layout(config, tp_size=tp)
    assert many.bytes_per_token == times * one.bytes_per_token


def test_a_multimodal_config_is_read_by_its_text_part() -> None:
    assert read_layout({"text_config": LLAMA_8B, "hidden_size": 1}).bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("changes", "full", "windowed"),
    [
        ({"sliding_window": 4096}, 0, 32),  # Mistral 7B
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, 5, 27),  # Gemma 3
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, 28, 4),
        ({"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, 8, 0),
    ],
)
def test_layer_kinds(changes: dict[str, Any], full: int, windowed: int) -> None:
    layout = read_layout(LLAMA_8B | changes)
    assert (layout.bytes_per_token, layout.window_bytes_per_token) == (full * 4096, windowed * 4096)


def test_layers_that_keep_a_state_are_named_and_not_counted() -> None:
    layout = read_layout(LLAMA_8B | {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8})
    assert layout.notes == ("24 layers keep a state instead of tokens: not counted",)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": "32"}, "num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"torch_dtype": "int3"}, "int3"),
    ],
)
def test_what_is_missing_or_impossible_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelConfigError, match=field):
        read_layout(LLAMA_8B | changes)
