"""Pictures, sound and films in a chat: what a template sees of them, and which tokens in front are certain.

How many tokens an item becomes is the model's affair, and the keys of its blocks carry a hash of its
content, so nothing is claimed from the first item on. What stands in front of it is the engine's plain work:
vLLM renders the chat with a bare `{"type": "image"}`, tokenises that text, and only then puts the item's
tokens in place of a placeholder token. So the tokens before the first placeholder stay as they are, for
models whose processor does nothing else. Those are listed here, from vLLM 0.32 (`_get_prompt_updates` in
`model_executor/models`); others insert items at the start, or merge line ends around them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

_MODALITIES: Final = {
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
# fields that the engine reads itself; a template that walks parts sees the others as they came
_READ_KEYS: Final = frozenset(
    (
        "type",
        "uuid",
        "text",
        "refusal",
        "thinking",
        "name",
        "closed",
        "data",
        "file",
        "prompt_cache_breakpoint",
    )
)
ITEM_KEYS: Final = frozenset(
    (
        *("audio_embeds", "audio_url", "image_embeds", "image_pil", "image_url"),
        *("input_audio", "prompt_embeds", "video_embeds", "video_url"),
    )
)
# by model type, what is put in place of one placeholder token and changes no other
_IN_PLACE: Final[Mapping[str, frozenset[str]]] = {
    "idefics3": frozenset(("image",)),
    "llama4": frozenset(("image",)),
    "llava": frozenset(("image",)),
    "llava_next": frozenset(("image",)),
    "qwen2_5_vl": frozenset(("image", "video")),
    "qwen2_audio": frozenset(("audio",)),
    "qwen2_vl": frozenset(("image", "video")),
    "qwen3_vl": frozenset(("image",)),
    "qwen3_vl_moe": frozenset(("image",)),
    "smolvlm": frozenset(("image",)),
}
# where the token that config.json names is not the one that a template writes, but what an item consists of
_PLACEHOLDERS: Final[Mapping[str, str]] = {"llama4": "<|image|>"}
KNOWN_KINDS: Final = frozenset(_IN_PLACE)
_PLACEHOLDER_NAMES: Final = tuple(
    f"{modality}_token_{suffix}" for modality in ("image", "audio", "video") for suffix in ("id", "index")
)


def shown_item(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a template that walks parts sees of the item `part`; None: the engine might read it otherwise.
    A `uuid` names the item's content and changes nothing in front of it."""
    kind = part.get("type")
    modality = _MODALITIES.get(kind) if isinstance(kind, str) else None
    named = ITEM_KEYS & part.keys()
    if modality is None or len(named) != 1 or _MODALITIES.get(next(iter(named))) != modality:
        return None
    kept = {key: value for key, value in part.items() if key not in _READ_KEYS and key not in ITEM_KEYS}
    return {"type": modality} | kept


class ItemPlaces:
    """Of one model (its config.json; {} for none): where its items begin in a prompt's tokens.
    `token_id` is of its tokenizer."""

    def __init__(
        self, model_config: Mapping[str, Any], token_id: Callable[[str], int | None] = lambda _: None
    ) -> None:
        model_type = model_config.get("model_type")
        self._modalities = (
            _IN_PLACE.get(model_type, frozenset()) if isinstance(model_type, str) else frozenset()
        )
        found: set[Any] = {model_config.get(name) for name in _PLACEHOLDER_NAMES}
        if isinstance(model_type, str) and model_type in _PLACEHOLDERS:
            found = {token_id(_PLACEHOLDERS[model_type])}
        self._placeholders = frozenset(token for token in found if type(token) is int and token >= 0)

    def admits(self, modalities: frozenset[str]) -> bool:
        """Whether tokens in front of such items can be known."""
        return bool(self._placeholders) and modalities <= self._modalities

    def tokens_before(self, ids: array[int]) -> array[int] | None:
        """The tokens in front of the first item; None: no item has a place. A placeholder that the client
        wrote into a text counts: the engine takes the first one that it finds."""
        places = []
        for token in self._placeholders:
            try:
                places.append(ids.index(token))
            except ValueError:
                continue
        return ids[: min(places)] if places else None
