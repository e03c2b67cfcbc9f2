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


def test_begin_and_end_tokens_as_written(tmp_path: Path) -> None:
    tokens = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}
    bare = load(tmp_path).encode("harbour", False)
    cases = [({}, [0], []), ({"add_bos_token": False}, [], []), ({"add_eos_token": True}, [], [1])]
    cases.append(({"add_bos_token": True, "add_eos_token": True}, [0], [1]))
    for flags, before, after in cases:
        tokenizer = load(tmp_path, **tokens, **flags)
        assert tokenizer.encode("harbour", True) == [*before, *bare, *after]
        assert tokenizer.encode("harbour", False) == bare
    assert load(tmp_path, add_bos_token=True).encode("harbour", True) == bare, "no begin token is named"


def test_tokens_that_the_vocabulary_lacks_are_added_in_order(tmp_path: Path) -> None:
    flags = {"lstrip": False, "rstrip": True, "single_word": False, "normalized": False, "special": True}
    tokenizer = load(
        tmp_path,
        added_tokens_decoder={"8193": {"content": "<b>", **flags}, "8192": {"content": "<a>", **flags}},
        extra_special_tokens={"image": "<img>"},
        additional_special_tokens=["<more>", {"content": "<|end|>"}],
        pad_token="<|pad|>",
    )
    assert tokenizer.encode("<a><b>", False) == [8192, 8193]
    assert tokenizer.encode("<a>   <|end|>", False) == tokenizer.encode("<a><|end|>", False), "rstrip"
    assert tokenizer.encode("<more><img>", False) == [8194, 8195]
    assert tokenizer.vocab_size == 8196


def test_special_tokens_may_be_plain_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, split_special_tokens=True)
    assert tokenizer.bos_id is None
    assert 0 not in tokenizer.encode("<|bos|>hi", False)
    assert not tokenizer.cut_rules().any


@pytest.mark.parametrize("bad", [{"x": {"content": "a"}}, {"1": {}}, {"1": "a"}, [1]])
def test_broken_tokens_are_a_sentence(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        load(tmp_path, added_tokens_decoder=bad)


def test_a_begin_token_that_is_new_to_the_vocabulary_is_added(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, bos_token="<new>", add_bos_token=True)
    assert tokenizer.encode("harbour", True)[0] == tokenizer.bos_id == 8192


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
