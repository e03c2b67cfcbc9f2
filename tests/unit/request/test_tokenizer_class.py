"""Tokenizer directories that an engine reads in another way than they stand are refused at the start.

Each refused case was seen to give other tokens with transformers 5.19; each accepted one the same.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epp.core.errors import ConfigError
from epp.request.chat import Unrenderable
from epp.request.local_tokenizer import LocalTokenizer
from tests.parity.families import FAMILIES, Family, by_name, write_family


def write(directory: Path, family: Family, **more: Any) -> Path:
    write_family(family, directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | more), encoding="utf-8")
    return directory


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_files_that_mean_one_thing_are_read(name: str, tmp_path: Path) -> None:
    assert LocalTokenizer.load(write(tmp_path, by_name(name))).vocab_size > 1000


@pytest.mark.parametrize(
    ("family", "changes", "more"),
    [
        ("mistral", {"kind": "legacy_metaspace"}, {}),
        ("mistral", {"kind": "gemma_like"}, {}),
        ("mistral", {"tokenizer_class": "LlamaTokenizerFast", "kind": "legacy_metaspace"}, {}),
        ("mistral", {}, {"legacy": True}),
        ("mistral", {}, {"add_prefix_space": False}),
        ("chatml", {"kind": "byte_level"}, {}),
        ("chatml", {}, {"add_prefix_space": True}),
        ("gemma", {"kind": "metaspace"}, {}),
    ],
)
def test_a_class_that_splits_text_itself_is_refused(
    family: str, changes: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json: for tokenizer_class .* does not split .*save_pretrained"
    ):
        LocalTokenizer.load(write(tmp_path, replace(by_name(family), **changes), **more))


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer"])
def test_a_class_that_takes_the_file_is_read(name: str, tmp_path: Path) -> None:
    """The same files under a class that reads them as they stand."""
    family = replace(by_name("mistral"), kind="legacy_metaspace", tokenizer_class=name)
    tokenizer = LocalTokenizer.load(write(tmp_path, family))
    assert tokenizer.encode("  two", add_special_tokens=True)[0] == tokenizer.bos_id


@pytest.mark.parametrize(
    ("more", "token"),
    [
        ({"additional_special_tokens": ["lazy"]}, "lazy"),
        ({"extra_special_tokens": ["dog"]}, "dog"),
        ({"extra_special_tokens": {"image_token": "<image>"}}, "<image>"),
        ({"added_tokens_decoder": {"5": {"content": "fox", "special": True}}}, "fox"),
        ({"mask_token": {"content": "<m>"}}, "<m>"),
    ],
)
def test_a_token_that_the_engine_would_add_is_refused(
    more: dict[str, Any], token: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"adds the token '{token}'"):
        LocalTokenizer.load(write(tmp_path, by_name("llama3"), **more))


def test_a_default_token_of_the_class_counts(tmp_path: Path) -> None:
    family = by_name("gemma")
    specials = tuple(token for token in family.specials if token != "<mask>")
    with pytest.raises(ConfigError, match="adds the token '<mask>'"):
        LocalTokenizer.load(write(tmp_path, replace(family, specials=specials)))


def test_named_tokens_that_are_there_are_fine(tmp_path: Path) -> None:
    named = {
        "additional_special_tokens": ["<|eot_id|>"],
        "added_tokens_decoder": {"1": {"content": "<|eot_id|>"}},
    }
    LocalTokenizer.load(write(tmp_path, by_name("llama3"), **named))


def test_split_special_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split_special_tokens"):
        LocalTokenizer.load(write(tmp_path, by_name("llama3"), split_special_tokens=True))


def test_chats_that_the_engine_renders_in_code_have_no_text(tmp_path: Path) -> None:
    directory = write(tmp_path, by_name("harmony"))
    messages = [{"role": "user", "content": "Hi"}]
    (directory / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert LocalTokenizer.load(directory).render_chat(messages, current_date="2026-01-01")
    (directory / "config.json").write_text('{"model_type": "gpt_oss"}', encoding="utf-8")
    tokenizer = LocalTokenizer.load(directory)
    assert tokenizer.encode("Hi", add_special_tokens=False)
    with pytest.raises(Unrenderable, match="no_chat_template"):
        tokenizer.render_chat(messages)
