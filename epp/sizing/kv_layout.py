"""Bytes of KV a token, from a model's config.json as Hugging Face writes it. Pure.

Three kinds of layers: those that keep every token, those that keep a window, those that keep a state of
fixed size (their bytes are not known here and are not counted: said as a note). MLA keeps one latent
vector a layer that all ranks repeat; a sparse indexer keeps a key of its own, on the layers that own one.
Sources: vLLM 0.32 `KVCacheSpec`s, `fp8_ds_mla` and the indexer's cache; fields as in Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DTYPE_BYTES = {
    "float32": 4.0,
    "float": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "auto": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_ds_mla": 1.0,
}
KV_DTYPES = tuple(sorted(_DTYPE_BYTES))
_INDEXER_SCALE_BYTES = 4  # one float for the fp8 key of a token
_SPARSE_MLA_TILE = 128  # latent values that share a float scale in fp8_ds_mla
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
_FULL = ("full_attention", "attention", "global_attention", "deepseek_sparse_attention")
_MAX_LAYERS = 10_000


class ModelConfigError(ValueError):
    """The config.json does not say enough; the message names the field."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What one engine (all its tensor-parallel ranks together) keeps for a sequence."""

    bytes_per_token: int  # of layers that keep every token
    window_bytes_per_token: int  # of layers that keep only `window_tokens`
    window_tokens: int
    notes: tuple[str, ...] = ()

    def sequence_bytes(self, tokens: int) -> int:
        """KV of one sequence of so many tokens."""
        return tokens * self.bytes_per_token + min(tokens, self.window_tokens) * self.window_bytes_per_token

    def effective_bytes_per_token(self, tokens: int) -> float:
        """`sequence_bytes` spread over the tokens: falls with the length where layers have windows."""
        return self.sequence_bytes(tokens) / tokens


def read_layout(config: Mapping[str, Any], *, kv_dtype: str = "auto", tp_size: int = 1) -> KvLayout:
    """Layout of the model that `config` describes; of a multimodal one its text part.

    Raises:
        ModelConfigError: a field is missing or cannot be.
    """
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else dict(config)
    value_bytes = _value_bytes(fields, kv_dtype)
    if tp_size < 1:
        raise ModelConfigError("tensor parallel size must be at least 1")
    full, windowed, stateful = _layer_kinds(fields)
    notes = []
    if stateful:
        notes.append(f"{stateful} layers keep a state instead of tokens: not counted")
    if fields.get("kv_lora_rank"):
        return _latent_layout(fields, full, value_bytes, kv_dtype, tp_size, notes)
    layer_bytes = _layer_bytes(fields, value_bytes, tp_size)
    window = _positive(fields, "sliding_window") if windowed else 0
    return KvLayout(full * layer_bytes, windowed * layer_bytes, window, tuple(notes))


def _value_bytes(fields: Mapping[str, Any], kv_dtype: str) -> float:
    name = str(fields.get("torch_dtype") or fields.get("dtype") or "auto") if kv_dtype == "auto" else kv_dtype
    name = name.removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise ModelConfigError(f"dtype {name!r} is not known; one of {', '.join(KV_DTYPES)}")
    return _DTYPE_BYTES[name]


def _layer_bytes(fields: Mapping[str, Any], value_bytes: float, tp_size: int) -> int:
    """Keys and values of one token in one layer. Fewer KV heads than ranks: each rank repeats one."""
    heads = _positive(fields, "num_attention_heads")
    kv_heads = _positive(fields, "num_key_value_heads") if "num_key_value_heads" in fields else heads
    head_dim = fields.get("head_dim") or _positive(fields, "hidden_size") // heads
    kept_heads = max(kv_heads, tp_size)
    return round(2 * kept_heads * _whole(head_dim, "head_dim") * value_bytes)


def _latent_layout(
    fields: Mapping[str, Any],
    layers: int,
    value_bytes: float,
    kv_dtype: str,
    tp_size: int,
    notes: list[str],
) -> KvLayout:
    latent, rope = _positive(fields, "kv_lora_rank"), _positive(fields, "qk_rope_head_dim")
    layer_bytes = round((latent + rope) * value_bytes)
    indexed = fields.get("index_head_dim") is not None or fields.get("index_topk") is not None
    if kv_dtype == "fp8_ds_mla":  # latent in fp8 with scales, rope part in bf16
        layer_bytes = latent + latent // _SPARSE_MLA_TILE * 4 + rope * 2
    total = layers * layer_bytes
    if indexed:
        key_bytes = _whole(fields.get("index_head_dim") or 128, "index_head_dim") + _INDEXER_SCALE_BYTES
        total += _indexer_layers(fields, layers) * key_bytes
    if tp_size > 1:
        notes.append(f"MLA: each of {tp_size} tensor-parallel ranks keeps the same latent vectors")
    return KvLayout(total * tp_size, 0, 0, tuple(notes))


def _indexer_layers(fields: Mapping[str, Any], layers: int) -> int:
    """Layers with an indexer of their own; the others use the choice of one before."""
    every = _whole(fields.get("index_topk_freq") or 1, "index_topk_freq")
    offset = fields.get("index_skip_topk_offset") or 0
    if not isinstance(offset, int) or offset < 0:
        raise ModelConfigError("index_skip_topk_offset: expected a count")
    return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))


def _layer_kinds(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """How many layers keep every token, a window, a state."""
    layers = _positive(fields, "num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise ModelConfigError(f"num_hidden_layers: {layers} is more than {_MAX_LAYERS}")
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise ModelConfigError(f"layer_types: {len(kinds)} entries for {layers} layers")
        full = sum(kind in _FULL for kind in kinds)
        windowed = sum(kind in _WINDOWED for kind in kinds)
        return full, windowed, layers - full - windowed
    if not fields.get("sliding_window") or fields.get("use_sliding_window") is False:
        return layers, 0, 0
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 1:  # every so many-th layer sees everything
        return layers // pattern, layers - layers // pattern, 0
    if "use_sliding_window" in fields:  # Qwen: the first layers see everything
        full = min(layers, _whole(fields.get("max_window_layers", layers) or layers, "max_window_layers"))
        return full, layers - full, 0
    return 0, layers, 0


def _positive(fields: Mapping[str, Any], name: str) -> int:
    if fields.get(name) is None:
        raise ModelConfigError(f"{name}: missing in the model's config.json")
    return _whole(fields[name], name)


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"{name}: expected a positive whole number")
    return value
