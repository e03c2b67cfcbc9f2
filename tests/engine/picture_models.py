"""Tiny configurations and the real processors of models that take pictures or sound; for vLLM's Python.

Usage: picture_models.py ROOT, with a directory a kind in ROOT (tests/parity/pictures.py: tokenizer and
template), which get config.json and processor files. Needs torchvision and num2words, and no weights: a
render server has none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 65_536,
}
_PINPOINTS = [[56, 112], [112, 56], [112, 112]]
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
_EDGE = {"longest_edge": 56}


class _Kind:
    """One directory: its tokenizer, and what is written beside it."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.directory = root / name
        config = json.loads((self.directory / "tokenizer_config.json").read_text())
        path = str(self.directory / "tokenizer.json")
        eos = config["eos_token"]
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=path, eos_token=eos, pad_token=eos)

    def id(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def mark(self, **tokens: str) -> None:
        """Tokens by the names under which a processor asks its tokenizer for them."""
        for name, token in tokens.items():
            setattr(self.tokenizer, name, token)
            setattr(self.tokenizer, f"{name}_id", self.id(token))

    def text(self, model_type: str, **more: Any) -> dict[str, Any]:
        size = -(-len(self.tokenizer) // 64) * 64
        return {**_TEXT, "model_type": model_type, "vocab_size": size, **more}

    def write(self, architecture: str, config: dict[str, Any], processor: Any) -> None:
        """The processor must not change what the router has: tokenizer and template."""
        own = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        kept = {name: (self.directory / name).read_bytes() for name in own}
        processor.save_pretrained(self.directory)
        for name, content in kept.items():
            (self.directory / name).write_bytes(content)
        whole = {
            "model_type": self.name,
            "architectures": [architecture],
            "torch_dtype": "bfloat16",
            **config,
        }
        (self.directory / "config.json").write_text(json.dumps(whole, indent=1))


def _llava(kind: _Kind, architecture: str, processor: type, images: Any, **more: Any) -> None:
    image = kind.id("<image>")
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    }
    config = {
        "image_token_id": image,
        "image_token_index": image,
        "text_config": kind.text("llama"),
        "vision_config": vision,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_seq_length": 16,
        **more,
    }
    made = processor(
        image_processor=images,
        tokenizer=kind.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    kind.write(architecture, config, made)


def llava(root: Path) -> None:
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    _llava(_Kind(root, "llava"), "LlavaForConditionalGeneration", transformers.LlavaProcessor, images)


def llava_next(root: Path) -> None:
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 56},
        crop_size={"height": 56, "width": 56},
        image_grid_pinpoints=_PINPOINTS,
    )
    kind, processor = _Kind(root, "llava_next"), transformers.LlavaNextProcessor
    more = {"image_grid_pinpoints": _PINPOINTS}
    _llava(kind, "LlavaNextForConditionalGeneration", processor, images, **more)


def _qwen(
    kind: _Kind, architecture: str, processor: type, videos: Any, text: dict[str, Any], **vision: Any
) -> None:
    kind.mark(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    tokenizer = kind.tokenizer
    images = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    shape = {"depth": 2, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {
        **{name: getattr(tokenizer, name) for name in names},
        "text_config": text,
        "vision_config": {"hidden_size": 64, **shape, **vision},
    }
    made = processor(image_processor=images, tokenizer=tokenizer, video_processor=videos)
    kind.write(architecture, config, made)


def qwen(root: Path) -> None:
    videos, newer = transformers.Qwen2VLVideoProcessor(), transformers.Qwen3VLVideoProcessor()
    older = {**_MROPE, "rope_type": "default"}
    kind = _Kind(root, "qwen2_vl")
    text = kind.text("qwen2_vl_text", rope_scaling=older)
    vision: dict[str, Any] = {"patch_size": 14, "embed_dim": 64, "mlp_ratio": 2}
    architecture = "Qwen2VLForConditionalGeneration"
    _qwen(kind, architecture, transformers.Qwen2VLProcessor, videos, text, **vision)

    kind = _Kind(root, "qwen2_5_vl")
    text = kind.text("qwen2_5_vl_text", rope_scaling=older)
    vision = {"patch_size": 14, "intermediate_size": 128, "out_hidden_size": 64}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    architecture = "Qwen2_5_VLForConditionalGeneration"
    _qwen(kind, architecture, transformers.Qwen2_5_VLProcessor, videos, text, **vision)

    vision = {"patch_size": 16, "intermediate_size": 128, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    rope = {**_MROPE, "mrope_interleaved": True}
    kind = _Kind(root, "qwen3_vl")
    text = kind.text("qwen3_vl_text", rope_scaling=rope)
    _qwen(kind, "Qwen3VLForConditionalGeneration", transformers.Qwen3VLProcessor, newer, text, **vision)
    kind = _Kind(root, "qwen3_vl_moe")
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    text = kind.text("qwen3_vl_moe_text", rope_scaling=rope, **experts)
    architecture = "Qwen3VLMoeForConditionalGeneration"
    _qwen(kind, architecture, transformers.Qwen3VLProcessor, newer, text, **vision)


def _idefics(kind: _Kind, architecture: str, processor: type, images: Any, **more: Any) -> None:
    kind.mark(
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    vision = {
        "model_type": f"{kind.name}_vision",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    config = {
        "image_token_id": kind.id("<image>"),
        "scale_factor": 1,
        "text_config": kind.text("llama"),
        "vision_config": vision,
    }
    made = processor(image_processor=images, tokenizer=kind.tokenizer, image_seq_len=16, **more)
    kind.write(architecture, config, made)


def idefics(root: Path) -> None:
    splits: dict[str, Any] = {
        "size": {"longest_edge": 112},
        "max_image_size": _EDGE,
        "do_image_splitting": True,
    }
    kind, processor = _Kind(root, "idefics3"), transformers.Idefics3Processor
    images = transformers.Idefics3ImageProcessor(**splits)
    _idefics(kind, "Idefics3ForConditionalGeneration", processor, images)
    sampling = {"fps": 1, "max_frames": 4, "video_size": _EDGE}
    videos = transformers.SmolVLMVideoProcessor(
        size=_EDGE, max_image_size=_EDGE, fps=1, num_frames=4, video_sampling=sampling
    )
    smol, processor = _Kind(root, "smolvlm"), transformers.SmolVLMProcessor
    images = transformers.SmolVLMImageProcessor(**splits)
    _idefics(smol, "SmolVLMForConditionalGeneration", processor, images, video_processor=videos)


def llama4(root: Path) -> None:
    kind = _Kind(root, "llama4")
    images = transformers.Llama4ImageProcessor(
        size={"height": 56, "width": 56}, max_patches=4, resize_to_max_canvas=False
    )
    made = transformers.Llama4Processor(
        image_processor=images, tokenizer=kind.tokenizer, patch_size=14, pixel_shuffle_ratio=0.5
    )
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    vision = {
        "model_type": "llama4_vision_model",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    }
    config = {
        "image_token_index": kind.id("<|patch|>"),
        "boi_token_index": kind.id("<|image_start|>"),
        "eoi_token_index": kind.id("<|image_end|>"),
        "text_config": kind.text("llama4_text", intermediate_size_mlp=128, **experts),
        "vision_config": vision,
    }
    kind.write("Llama4ForConditionalGeneration", config, made)


def qwen2_audio(root: Path) -> None:
    kind = _Kind(root, "qwen2_audio")
    made = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128),
        tokenizer=kind.tokenizer,
        audio_token="<|AUDIO|>",
        audio_bos_token="<|audio_bos|>",
        audio_eos_token="<|audio_eos|>",
    )
    audio = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 64,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
    }
    config = {
        "audio_token_index": kind.id("<|AUDIO|>"),
        "text_config": kind.text("qwen2"),
        "audio_config": audio,
    }
    kind.write("Qwen2AudioForConditionalGeneration", config, made)


if __name__ == "__main__":
    for make in (llava, llava_next, qwen, idefics, llama4, qwen2_audio):
        make(Path(sys.argv[1]))
