"""Fields of tokenizer_config.json that change tokens, on directories as models ship them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epp.core.errors import ConfigError
from epp.request.local_tokenizer import LocalTokenizer

DIRECTORY = Path(__file__).resolve().parents[3] / "config" / "tokenizer"


def load(tmp_path: Path, **config: Any) -> LocalTokenizer:
    (tmp_path / "tokenizer.json").write_bytes((DIRECTORY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return LocalTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [{"add_bos_token": False}, {"add_eos_token": True}, {"add_bos_token": True, "add_eos_token": True}],
)
def test_begin_and_end_tokens_are_those_of_tokenizer_json(tmp_path: Path, flags: dict[str, bool]) -> None:
    """Seen with transformers 5.19: beside a tokenizer.json the flags change nothing."""
    tokens = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}
    tokenizer = load(tmp_path, **tokens, **flags)
    assert tokenizer.encode("harbour", True) == [0, *tokenizer.encode("harbour", False)]


def test_a_begin_token_that_the_vocabulary_lacks_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adds the token '<new>'"):
        load(tmp_path, bos_token="<new>")


def test_bytes_that_are_no_text_are_a_sentence(tmp_path: Path) -> None:
    load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not UTF-8"):
        LocalTokenizer.load(tmp_path)


def test_a_chat_template_from_elsewhere_wins(tmp_path: Path) -> None:
    """A ConfigMap beside the model's files, as the engine's --chat-template."""
    load(tmp_path, chat_template="own")
    other = tmp_path / "mounted.jinja"
    other.write_text("{{ messages[0].content }}!")
    tokenizer = LocalTokenizer.load(tmp_path, chat_template_path=other)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    with pytest.raises(ConfigError, match=r"gone\.jinja: No such file"):
        LocalTokenizer.load(tmp_path, chat_template_path=tmp_path / "gone.jinja")


def test_chats_with_tools_have_a_template_of_their_own_where_there_is_one(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain {{ unk_token }}"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokenizer = load(tmp_path, chat_template=named, unk_token="<|pad|>")
    assert tokenizer.render_chat(messages) == "plain <|pad|>"
    assert tokenizer.render_chat(messages, tools) == "1 tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file with tools")
    tokenizer = LocalTokenizer.load(tmp_path)
    assert tokenizer.render_chat(messages) == "file"
    assert tokenizer.render_chat(messages, tools) == "file with tools"
