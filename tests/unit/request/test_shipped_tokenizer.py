"""The tokenizer in config/tokenizer: reproducible, small, lossless, and with a begin token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.errors import ConfigError
from epp.request.chat import Unrenderable
from epp.request.local_tokenizer import LocalTokenizer

DIRECTORY = Path(__file__).resolve().parents[3] / "config" / "tokenizer"


def test_making_it_again_gives_the_same_bytes(tmp_path: Path) -> None:
    again = tmp_path / "tokenizer.json"
    command = [sys.executable, str(DIRECTORY / "make_tokenizer.py"), "--output", str(again)]
    subprocess.run(command, check=True, timeout=60)
    assert again.read_bytes() == (DIRECTORY / "tokenizer.json").read_bytes()


def test_check_notices_a_changed_file(tmp_path: Path) -> None:
    changed = tmp_path / "tokenizer.json"
    changed.write_text((DIRECTORY / "tokenizer.json").read_text(encoding="utf-8")[:-2], encoding="utf-8")
    command = [sys.executable, str(DIRECTORY / "make_tokenizer.py"), "--check", "--output", str(changed)]
    assert subprocess.run(command, check=False, timeout=60, capture_output=True).returncode == 1


def test_size_and_special_tokens(tokenizer: LocalTokenizer) -> None:
    assert (DIRECTORY / "tokenizer.json").stat().st_size < 600_000
    assert tokenizer.vocab_size == 8192
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_id == 1
    ids = tokenizer.encode("<|system|><|user|><|assistant|><|end|>", add_special_tokens=False)
    assert len(ids) == 4, "special tokens are one id each"


def test_begin_token_once_and_only_when_asked(tokenizer: LocalTokenizer) -> None:
    """S-C15: completions text gets the begin token that the engine adds."""
    plain = tokenizer.encode("Where is the harbour?", add_special_tokens=False)
    with_begin = tokenizer.encode("Where is the harbour?", add_special_tokens=True)
    assert tokenizer.bos_id not in plain
    assert with_begin == [tokenizer.bos_id, *plain]


def test_words_cost_few_tokens(tokenizer: LocalTokenizer) -> None:
    text = " ".join(f"word{number}" for number in range(1000, 2000))
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 3 * 1000, "word + 3 digits + 1 digit"


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_a_round_trip(tokenizer: LocalTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5), st.booleans())
def test_a_batch_is_its_texts_one_by_one(tokenizer: LocalTokenizer, texts: list[str], special: bool) -> None:
    assert tokenizer.encode_batch(texts, special) == [tokenizer.encode(text, special) for text in texts]


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/tokenizer\.json: no such file"):
        LocalTokenizer.load(tmp_path / "nowhere")


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        LocalTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((DIRECTORY / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: not a chat template"):
        LocalTokenizer.load(tmp_path)


def test_template_and_tokens_of_the_config_file(tmp_path: Path) -> None:
    """Older model directories keep the template, and token objects, in tokenizer_config.json."""
    (tmp_path / "tokenizer.json").write_bytes((DIRECTORY / "tokenizer.json").read_bytes())
    config = {
        "bos_token": {"content": "<|bos|>", "special": True},
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = LocalTokenizer.load(tmp_path)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_id is None
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|bos|>hi"


def test_no_template_is_not_renderable(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DIRECTORY / "tokenizer.json").read_bytes())
    tokenizer = LocalTokenizer.load(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(Unrenderable, match="no_chat_template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
