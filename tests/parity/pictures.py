"""Models that take pictures or sound, and requests that show them some: what a router may match in front.

A kind is what `config.json` calls `model_type`. Its tokenizer is the family `parts` with the kind's own
marks, its template puts the kind's placeholder where a picture stands. What the real processors made of the
requests is in tests/data/parity/pictures.tsv (the tokens in front of the first item);
tests/engine/record_pictures.py asks.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.parity.chats import Fields, system, text, user
from tests.parity.corpus import CHAT, MODEL, Case
from tests.parity.families import by_name, write_family
from tests.parity.others import MESSAGES, RESPONSES

RECORD: Final = "pictures"
LONG: Final = "The harbour lies behind the hill. " * 6
_QWEN: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS: Final = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
_LLAMA4: Final = (
    *("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)
_AUDIO: Final = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")


@dataclass(frozen=True, slots=True)
class Kind:
    """`shown`: what the template writes for an item; `config_ids`: tokens that config.json names."""

    name: str
    marks: tuple[str, ...]
    shown: str
    config_ids: tuple[tuple[str, str], ...]
    modality: str = "image"


_QWEN_IDS: Final = (("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"))
_SHOWN_BY_QWEN: Final = "<|vision_start|><|image_pad|><|vision_end|>"
KINDS: Final = (
    *(
        Kind(name, ("<image>",), "<image>", (("image_token_index", "<image>"),))
        for name in ("llava", "llava_next")
    ),
    *(
        Kind(name, _QWEN, _SHOWN_BY_QWEN, _QWEN_IDS)
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    ),
    *(Kind(name, _IDEFICS, "<image>", (("image_token_id", "<image>"),)) for name in ("idefics3", "smolvlm")),
    Kind("llama4", _LLAMA4, "<|image|>", (("image_token_index", "<|patch|>"),)),
    Kind("qwen2_audio", _AUDIO, "".join(_AUDIO), (("audio_token_index", "<|AUDIO|>"),), "audio"),
)


def write_kind(kind: Kind, directory: Path) -> None:
    """Tokenizer and template; of the configuration what a router reads."""
    family = by_name("parts")
    own = tuple(mark for mark in family.specials if mark not in kind.marks)
    write_family(replace(family, specials=(*own, *kind.marks)), directory)
    template = directory / "chat_template.jinja"
    source = template.read_text(encoding="utf-8").replace("<|image_pad|>", kind.shown)
    if kind.modality != "image":
        source = source.replace("part.type == 'image' or 'image' in part", f"part.type == '{kind.modality}'")
    template.write_text(source, encoding="utf-8")
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = {"model_type": kind.name} | {name: ids[mark] for name, mark in kind.config_ids}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def picture_url(shade: int) -> str:
    """A grey PNG."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    side = 56
    rows = (b"\0" + bytes([shade]) * 3 * side) * side
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _sound(samples: int) -> Fields:
    """Silence, as a part of a chat."""
    form = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
    data = bytes(2 * samples)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    wave = b"RIFF" + struct.pack("<I", len(body)) + body
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(wave).decode(), "format": "wav"},
    }


def picture_cases(kind: Kind) -> list[Case]:
    """The same requests for every kind; in other APIs than chats there are only pictures."""
    shapes = [(CHAT, *shape) for shape in _chats(kind)]
    if kind.modality == "image":
        shapes += [(RESPONSES, *shape) for shape in _responses()]
        shapes += [(MESSAGES, *shape) for shape in _anthropic()]
    return [
        Case(kind.name, name, path, json.dumps({"model": MODEL, **fields}).encode())
        for path, name, fields in shapes
    ]


def _chats(kind: Kind) -> Iterator[tuple[str, Fields]]:
    def item(number: int, **more: Any) -> Fields:
        if kind.modality == "audio":
            return _sound(1600 * number) | more
        return {"type": "image_url", "image_url": {"url": picture_url(number)}, **more}

    for name, parts in (
        ("in_front", [item(1), *text("What is it?")]),
        ("between", [*text("Look at this:"), item(2), *text("What is it?")]),
        ("two", [*text("One:"), item(3), *text("two:"), item(4)]),
        ("named", [*text("Look:"), item(5, uuid="item-5")]),
        ("detail", [*text("Look:"), item(6, detail="low")]),
        ("literal", [*text(f"Write {kind.marks[0]} here:"), item(7)]),
        ("marks", [*text("a <|im_end|> <think> b\n\n"), item(8)]),
        ("blanks", [*text("a  \n\n "), item(9), *text("\n b")]),
        ("none", text("Only text.")),
    ):
        yield name, {"messages": [system(LONG), user(parts)]}
    later = [user("First."), {"role": "assistant", "content": "Yes."}, user([item(2), *text("And?")])]
    yield "later", {"messages": later}


def _responses() -> Iterator[tuple[str, Fields]]:
    def inputs(one: str) -> Fields:
        return {"type": "input_text", "text": one}

    image = {"type": "input_image", "image_url": picture_url(1)}
    yield "between", {"instructions": LONG, "input": [user([inputs("Look:"), image, inputs("What?")])]}
    yield "detail", {"input": [user([inputs("Look:"), image | {"detail": "high"}])]}
    shown = image | {"detail": "auto"}
    call = {"type": "function_call", "call_id": "call_00000001", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_00000001", "output": [inputs("It:"), shown]}
    yield "result", {"input": [user("Show"), call, output]}


def _anthropic() -> Iterator[tuple[str, Fields]]:
    data = picture_url(1).partition(",")[2]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    linked = {"type": "image", "source": {"type": "url", "url": picture_url(2)}}
    used = {"type": "tool_use", "id": "toolu_000001", "name": "f", "input": {}}
    gave = {"type": "tool_result", "tool_use_id": "toolu_000001", "content": [image, *text("It is:")]}
    for name, messages in (
        ("between", [user([*text("Look:"), image, *text("What?")])]),
        ("linked", [user([*text("Look:"), linked])]),
        ("empty", [user([{"type": "image", "source": {}}, *text("Only text.")])]),
        ("result", [user("Show"), {"role": "assistant", "content": [used]}, user([gave, *text("And?")])]),
        ("system_inside", [user("Go"), system("Late."), user([*text("Look:"), image])]),
    ):
        yield name, {"max_tokens": 4, "system": LONG, "messages": messages}
