"""What the engine tests add to the tiny model of `deploy.local.vllm.weights`: a LoRA adapter on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from deploy.local.vllm.weights import TINY, Shape, write_model, write_safetensors

__all__ = ["TINY", "Shape", "write_adapter", "write_model"]


def write_adapter(directory: Path, rank: int = 8) -> None:
    """A LoRA adapter on two projections of the tiny model, in PEFT's layout."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    random = np.random.default_rng(1)
    weights = {}
    for layer in range(TINY.layers):
        for name, heads in (("q_proj", TINY.heads), ("v_proj", TINY.kv_heads)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            weights[at + "lora_A.weight"] = random.normal(0, 0.1, (rank, TINY.hidden)).astype(np.float32)
            weights[at + "lora_B.weight"] = random.normal(0, 0.1, (heads * TINY.head, rank)).astype(
                np.float32
            )
    write_safetensors(directory / "adapter_model.safetensors", weights)
