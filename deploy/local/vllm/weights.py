"""A small random Llama in the Hugging Face layout, written without torch.

Why random: pulls are about tokens and blocks, not about sense. Why by hand: `config.json` plus one
safetensors file (a JSON header and raw bytes) need nothing but numpy, so the product's own environment
makes the model and vLLM's only reads it. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

MAX_POSITIONS: Final = 65_536


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the model is."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    inner: int = 128

    @property
    def head(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, two bytes each."""
        return 2 * 2 * self.layers * self.kv_heads * self.head


TINY: Final = Shape()


def write_model(directory: Path, *, bos: str | None, eos: str, shape: Shape = TINY) -> None:
    """Add weights and configuration to a tokenizer directory."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rows = -(-tokenizer.get_vocab_size(with_added_tokens=True) // 64) * 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": None if bos is None else tokenizer.token_to_id(bos),
        "eos_token_id": tokenizer.token_to_id(eos),
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_safetensors(directory / "model.safetensors", _weights(rows, shape))


def _weights(rows: int, shape: Shape) -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> npt.NDArray[np.float32]:
        return random.normal(0.0, 0.08, shape).astype(np.float32)

    hidden, head = shape.hidden, shape.head
    weights = {
        "model.embed_tokens.weight": matrix(rows, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": np.ones(hidden, np.float32),
            at + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            at + "self_attn.q_proj.weight": matrix(shape.heads * head, hidden),
            at + "self_attn.k_proj.weight": matrix(shape.kv_heads * head, hidden),
            at + "self_attn.v_proj.weight": matrix(shape.kv_heads * head, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, shape.heads * head),
            at + "mlp.gate_proj.weight": matrix(shape.inner, hidden),
            at + "mlp.up_proj.weight": matrix(shape.inner, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, shape.inner),
        }
    return weights


def write_safetensors(path: Path, weights: dict[str, npt.NDArray[np.float32]]) -> None:
    """As bfloat16, the upper half of float32; the header is padded so that the data is aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[bytes] = []
    at = 0
    for name, value in weights.items():
        piece = (value.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, at + len(piece)]}
        pieces.append(piece)
        at += len(piece)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))
