"""A tiny model that takes pictures (Idefics3 in its shape), without weights: the engine makes some up.

Why this kind: its processor is one of those that put an item in place of one placeholder token, and it runs
without torchvision, which the engine's environment has not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from epp.request.local_tokenizer import LocalTokenizer
from tests.engine import model
from tests.parity.families import by_name, write_family

IMAGE_TOKENS: Final = 16  # a picture becomes (56 / 14)^2 tokens and the marks around them
_IMAGE_TOKEN: Final = "<image>"
_MARKS: Final = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", _IMAGE_TOKEN)
# of the effort every value renders alike but "low": the engine takes that for switched-off thinking
_EFFORT: Final = (
    "{%- if reasoning_effort is defined -%}"
    "{{- 'brief ' if reasoning_effort == 'low' else 'long ' -}}"
    "{%- endif -%}"
)
_EDGE: Final = {"longest_edge": 56}


def write_item_model(directory: Path) -> None:
    """Tokenizer, template, processor and configuration in `directory`."""
    family = by_name("parts")
    family = replace(family, specials=(*family.specials, *_MARKS))
    write_family(family, directory)
    template = directory / "chat_template.jinja"
    source = template.read_text(encoding="utf-8").replace("<|image_pad|>", _IMAGE_TOKEN)
    template.write_text(_EFFORT + source, encoding="utf-8")
    tokenizer = LocalTokenizer.load(directory)
    _write(directory / "config.json", _model_config(tokenizer))
    _write(directory / "preprocessor_config.json", _image_processor())
    _write(
        directory / "processor_config.json",
        {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS},
    )


def _model_config(tokenizer: LocalTokenizer) -> dict[str, Any]:
    text = {
        "model_type": "llama",
        "vocab_size": -(-tokenizer.vocab_size // 64) * 64,
        "hidden_size": model.HIDDEN,
        "intermediate_size": model.INNER,
        "num_hidden_layers": model.LAYERS,
        "num_attention_heads": model.HEADS,
        "num_key_value_heads": model.KV_HEADS,
        "head_dim": model.HIDDEN // model.HEADS,
        "max_position_embeddings": 8192,
        "pad_token_id": tokenizer.eos_id,
    }
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": tokenizer.encode(_IMAGE_TOKEN, False)[0],
        "scale_factor": 1,
        "text_config": text,
        "vision_config": vision,
        "torch_dtype": "bfloat16",
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.eos_id,
    }


def _image_processor() -> dict[str, Any]:
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "rescale_factor": 1 / 255,
        "resample": 1,
        "size": _EDGE,
        "max_image_size": _EDGE,
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
