"""Tokenizer directories as an engine's transformers reads them: what the router accepts, it reads alike.

And what it refuses for its `tokenizer_class` or for tokens only the configuration names is really read
in another way: the refusal costs nobody a match that would have been right.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epp.core.errors import ConfigError
from epp.request.local_tokenizer import LocalTokenizer
from tests.engine import processes
from tests.engine.model import write_model
from tests.parity.families import FAMILIES, Family, by_name, write_family

TEXTS = (
    "The quick brown fox jumps over the lazy dog 12345.",
    "  two  blanks, e\u0301 日本 🙂\n\n x",
    "[INST] a[/INST] b</s> c <s>d <|im_start|>e<|im_end|> <mask> <think>f",
)
FLAGS: tuple[dict[str, Any], ...] = (
    {"add_bos_token": True},
    {"add_bos_token": False},
    {"add_eos_token": True, "add_bos_token": True},
    {"clean_up_tokenization_spaces": True},
)


def accepted() -> list[tuple[Family, dict[str, Any]]]:
    plain: list[tuple[Family, dict[str, Any]]] = [(family, {}) for family in FAMILIES]
    flagged = [(by_name(name), flags) for name in ("llama3", "mistral", "gemma", "phi") for flags in FLAGS]
    legacy = replace(by_name("mistral"), kind="legacy_metaspace", tokenizer_class="PreTrainedTokenizerFast")
    return [*plain, *flagged, (legacy, {})]


def refused() -> list[tuple[Family, dict[str, Any]]]:
    mistral, chatml, gemma = by_name("mistral"), by_name("chatml"), by_name("gemma")
    unmasked = tuple(token for token in gemma.specials if token != "<mask>")
    return [
        (replace(mistral, kind="legacy_metaspace"), {}),
        (replace(by_name("llama3"), tokenizer_class="LlamaTokenizerFast"), {}),
        (replace(chatml, kind="byte_level"), {}),
        (replace(gemma, specials=unmasked), {}),
        (mistral, {"legacy": True}),
        (mistral, {"add_prefix_space": False}),
        (chatml, {"add_prefix_space": True}),
        (by_name("llama3"), {"extra_special_tokens": ["dog"]}),
        (by_name("llama3"), {"added_tokens_decoder": {"5": {"content": "fox", "special": True}}}),
    ]


def write(directory: Path, family: Family, more: dict[str, Any]) -> Path:
    write_family(family, directory)
    write_model(directory, bos=family.bos, eos=family.eos)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | more), encoding="utf-8")
    return directory


def engine_ids(work: Path, directories: list[Path]) -> list[list[list[int]]]:
    texts = work / "texts.json"
    texts.write_text(json.dumps(TEXTS), encoding="utf-8")
    script = Path(__file__).parent / "encode_texts.py"
    done = subprocess.run(
        [str(processes.PYTHON), str(script), str(texts), *map(str, directories)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        capture_output=True,
        check=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def router_ids(directory: Path) -> list[list[int]]:
    tokenizer = LocalTokenizer.load(directory)
    return [tokenizer.encode(text, flag) for flag in (True, False) for text in TEXTS]


@pytest.mark.timeout(600)
def test_what_is_accepted_is_read_alike(tmp_path: Path) -> None:
    directories = [write(tmp_path / str(n), *case) for n, case in enumerate(accepted())]
    assert [router_ids(directory) for directory in directories] == engine_ids(tmp_path, directories)


@pytest.mark.timeout(600)
def test_what_is_refused_is_read_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [write(tmp_path / str(n), *case) for n, case in enumerate(refused())]
    for directory in directories:
        with pytest.raises(ConfigError, match="would not be the engine's"):
            LocalTokenizer.load(directory)
    monkeypatch.setattr("epp.request.local_tokenizer.unread_reason", lambda *_: None)
    theirs = engine_ids(tmp_path, directories)
    assert [router_ids(directory) == ids for directory, ids in zip(directories, theirs, strict=True)] == [
        False
    ] * len(directories)
