"""Cuts of a text are exact: tokens of the parts are the tokens of the whole, for each family."""

from __future__ import annotations

import functools
import json
import re
from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers

from epp.request.cut_rules import CutRules, cut_rules
from epp.request.incremental import IncrementalEncoder
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.segments import SEGMENT_CHARS, Segmenter
from epp.request.token_cache import TokenCache
from tests.unit.request.families import ALL, AT_BLANKS, AT_MARKS, SPECIALS, family

PIECES = st.sampled_from(
    [
        *SPECIALS,
        "<|user|>",
        "<mask>",
        "<unk>",
        "<|im_",
        "start|>",
        "|>",
        "<",
        " ",
        "  ",
        "   ",
        "\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u2028",
        "\u200b",
        "\u3000",
        "▁",
        "Ġ",
        "e",
        "\u0301",
        "\u0327",
        "é",
        "ß",
        "İ",
        "ﬁ",
        "ﷺ",
        "¨",
        "한",
        "ᄒ",
        "\u1161",
        "中",
        "文",
        "あ",
        "が。",
        "文，",
        "ア、か\u3099。\u3099",
        "한국어？！",
        "。",
        "，\n",
        "：",
        "中。 文",
        "中文，中文。",
        "🙂",
        "👩\u200d🚀",
        "𝒳",
        "12345",
        "²",
        "'s",
        "'RE",
        "...",
        "_",
        "/",
        "word",
        "one two  three",
        "é 中 x\u0301 y",
        "9 10 11",
        "a the b ",
        "Harbour",
        "harbour",
        "x",
        "\x00",
        "\x1c",
        "\ufeff",
    ]
)
TEXTS = st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=25).map(
    "".join
)


@functools.cache
def rules_of(name: str) -> CutRules:
    return cut_rules(family(name))


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def in_parts(tokenizer: Tokenizer, rules: CutRules, text: str, segment_chars: int = 1) -> list[int]:
    parts = list(Segmenter(rules, segment_chars=segment_chars).segments(text))
    assert "".join(parts) == text
    return [token for part in parts for token in whole(tokenizer, part)]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_cut_everywhere_is_the_whole(name: str, text: str) -> None:
    """Every safe cut of every family at once: special tokens in user text, unicode, byte fallback."""
    tokenizer = family(name)
    assert in_parts(tokenizer, rules_of(name), text) == whole(tokenizer, text)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(text=TEXTS, segment_chars=st.integers(1, 40), special=st.booleans())
def test_the_encoder_is_the_tokenizer(name: str, text: str, segment_chars: int, special: bool) -> None:
    """With begin and end tokens, with a cache that forgets nearly everything, once and again."""
    tokenizer = LocalTokenizer(family(name))
    encoder = IncrementalEncoder(tokenizer, rules_of(name), TokenCache(2000), segment_chars=segment_chars)
    for given_text in (text, text + "<|im_start|>user more", text):
        assert encoder.encode(given_text, special) == array("I", tokenizer.encode(given_text, special))


@pytest.mark.parametrize("name", ALL)
def test_which_families_are_cut_where(name: str) -> None:
    rules = cut_rules(family(name))
    assert {"<|bos|>", "<|end|>" if name == "shipped" else "<|im_start|>"} <= set(rules.tokens)
    assert rules.at_blanks is (name in AT_BLANKS)
    assert rules.at_marks is (name in AT_MARKS)
    assert bool(rules.reasons) is (name not in AT_BLANKS), "what is not done is said"
    wanted = {"llama2": "normalizer Prepend", "gemma": "normalizer Replace", "metaspace_unsplit": "Metaspace"}
    assert wanted.get(name, "") in "".join(rules.reasons)


def test_a_text_without_blanks_is_cut_at_its_marks() -> None:
    rules = cut_rules(family("qwen"))
    cut = list(Segmenter(rules, segment_chars=1).segments("你好，世界。。3，x，한국！ 中、\n文"))
    assert cut == ["你好", "，世界", "。。3，x，한국", "！ 中", "、\n文"]
    document = "".join(f"港口在山的后面{number}号，那里很安静。" for number in range(3000))
    assert max(map(len, Segmenter(rules).segments(document))) < SEGMENT_CHARS + 40


@pytest.mark.parametrize("name", ["roberta", "metaspace_always", "llama2"])
def test_without_the_rules_cuts_at_marks_are_wrong(name: str) -> None:
    """Negative control of the comparison above."""
    tokenizer = family(name)
    texts = ["中，中", "文。文", "あ、あ", "한국어？"]
    lie = CutRules(at_marks=True)
    assert any(in_parts(tokenizer, lie, text) != whole(tokenizer, text) for text in texts)


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("文。", normalized=False),
        AddedToken("x文。y", normalized=True),
        AddedToken("。", single_word=True, normalized=False),
    ],
)
def test_added_tokens_that_reach_over_a_mark_forbid_cuts_there(token: AddedToken) -> None:
    assert not cut_rules(with_added(token)).at_marks
    assert cut_rules(with_added(AddedToken("。", normalized=False))).at_marks


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "NFD"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"\p{L}+\p{P}|\p{P}"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
)
def test_steps_that_forbid_cuts_at_marks(steps: dict[str, Any]) -> None:
    assert not cut_rules(changed("llama3", **steps)).at_marks


@pytest.mark.parametrize("name", ["llama2", "gemma"])
def test_without_the_rules_the_tokens_differ(name: str) -> None:
    """Negative control: the refused cuts are wrong ones, and the comparison notices."""
    tokenizer = family(name)
    lie = CutRules(at_blanks=True)
    texts = ["the library opens at eight and the harbour is quiet", "a b c d", "of the of the of the"]
    assert any(in_parts(tokenizer, lie, text) != whole(tokenizer, text) for text in texts)


def test_a_text_is_cut_at_all() -> None:
    """Else the comparisons above would compare nothing."""
    rules = cut_rules(family("llama3"))
    cut = list(Segmenter(rules, segment_chars=1).segments("one two, <|im_end|>three  four\n five"))
    assert cut == ["one", " two, ", "<|im_end|>three", "  four\n five"]
    rules = cut_rules(family("llama2"))
    assert list(Segmenter(rules, segment_chars=1).segments("one two<|im_end|>three")) == [
        "one two",
        "<|im_end|>three",
    ]


def test_a_turn_ends_a_segment_long_before_a_document_does() -> None:
    """So the end of a conversation is not encoded again with the next turn."""
    segmenter = Segmenter(rules_of("llama3"))
    turns = [f"<|im_start|>user\n{'harbour ' * 60}<|im_end|>\n" for _ in range(5)]
    assert [len(part) for part in segmenter.segments("".join(turns))] == [
        len(turns[0]) - len("<|im_end|>\n"),
        *[len(turns[0])] * 4,
        len("<|im_end|>\n"),
    ]
    document = list(segmenter.segments("harbour " * 1000))
    assert {len(part) for part in document[:-1]} <= {SEGMENT_CHARS, SEGMENT_CHARS + 7}


@pytest.mark.parametrize("initials", ["<", "<[", "<[{(!#"])
def test_tokens_of_any_initials_are_found(initials: str) -> None:
    tokens = tuple(f"{initial}{name}>" for initial in initials for name in ("a", "ab", "bos"))
    segmenter = Segmenter(CutRules(tokens=tokens), segment_chars=1)
    text = "x".join(tokens)
    assert list(segmenter.segments(text)) == [f"{token}x" for token in tokens[:-1]] + [tokens[-1]]


@settings(deadline=None)
@given(head=TEXTS, tails=st.tuples(TEXTS, TEXTS))
def test_texts_share_the_segments_of_their_common_beginning(head: str, tails: tuple[str, str]) -> None:
    """All but the last segment that lies in the common beginning, whatever follows."""
    segmenter = Segmenter(rules_of("llama3"), segment_chars=5)
    first, second = (list(segmenter.segments(head + tail)) for tail in tails)
    shared = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        shared += len(a)
    alone = list(segmenter.segments(head))
    assert shared >= sum(map(len, alone[:-1]))


def test_every_letter_and_digit_keeps_to_itself_in_front_of_a_blank() -> None:
    """By exhaustion: what the rule assumes of normalizers, for every character it cuts behind."""
    forms = [normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD()]
    forms.append(normalizers.Lowercase())
    letters = [c for c in map(chr, range(0x10000)) if c.isalnum() and not "\ud800" <= c <= "\udfff"]
    assert len(letters) > 40_000
    for normalizer in forms:
        one_text = normalizer.normalize_str(" ".join(letters))
        one_by_one = [normalizer.normalize_str(letter) for letter in letters]
        assert one_text == " ".join(one_by_one)
        assert all(form and not form[-1].isspace() for form in one_by_one)


# --- added tokens ---------------------------------------------------------------------------------
def with_added(*tokens: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer.from_str(family("llama3").to_str())
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<lstrip>", lstrip=True, normalized=False),
        AddedToken("<single>", single_word=True, normalized=False),
        AddedToken("<normal>", normalized=True),
        AddedToken("letters", normalized=False),
        AddedToken("_under", normalized=False),
        AddedToken(" <blank>", normalized=False),
    ],
)
def test_these_added_tokens_are_no_places_to_cut(token: AddedToken) -> None:
    assert token.content not in cut_rules(with_added(token)).tokens


@pytest.mark.parametrize(
    "other", ["<|im_start|>x", "<<|im_start|>", "a<|im", "|><|im_start", "xx<|im_start|>xx"]
)
def test_a_token_that_can_hide_behind_another_is_no_place_to_cut(other: str) -> None:
    tokenizer = with_added(AddedToken(other, normalized=False))
    rules = cut_rules(tokenizer)
    assert "<|im_start|>" not in rules.tokens
    assert "<|endoftext|>" in rules.tokens or other.startswith("|>")
    for text in (f"a {other}<|im_start|> b{other}", f"{other}{other}<|im_end|>{other}"):
        assert in_parts(tokenizer, rules, text) == whole(tokenizer, text)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (AddedToken("two words", normalized=False), "holds a blank"),
        (AddedToken("<|end", rstrip=True, normalized=False), "behind its last letter"),
        (AddedToken(" word", single_word=True, normalized=False), "stand alone"),
    ],
)
def test_added_tokens_that_reach_over_a_blank_forbid_cuts_there(token: AddedToken, reason: str) -> None:
    rules = cut_rules(with_added(token))
    assert not rules.at_blanks
    assert any(reason in said for said in rules.reasons)


# --- steps that are not recognised ------------------------------------------------------------------
def changed(name: str, **steps: Mapping[str, Any] | None) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(family(name).to_str()) | steps))


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (changed("llama3", normalizer={"type": "Strip", "strip_left": True, "strip_right": True}), "Strip"),
        (changed("llama3", normalizer={"type": "StripAccents"}), "bring blanks together"),
        (changed("llama3", pre_tokenizer={"type": "UnicodeScripts"}), "UnicodeScripts"),
        (changed("llama3", pre_tokenizer=None), "does not separate"),
        (changed("llama3", pre_tokenizer={"type": "Digits", "individual_digits": True}), "does not separate"),
        (
            changed("llama3", pre_tokenizer={"type": "Punctuation", "behavior": "MergedWithNext"}),
            "Punctuation",
        ),
        (
            changed(
                "llama3",
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": r"\w+\s|."},
                    "behavior": "Isolated",
                    "invert": False,
                },
            ),
            "pattern",
        ),
    ],
)
def test_refused_steps_are_named_and_exact_all_the_same(tokenizer: Tokenizer, reason: str) -> None:
    rules = cut_rules(tokenizer)
    assert not rules.at_blanks
    assert any(reason in said for said in rules.reasons)
    text = "  One harbour 123 <|im_start|> two  <|im_end|>"
    assert in_parts(tokenizer, rules, text) == whole(tokenizer, text)


def test_an_unsteady_model_is_never_cut() -> None:
    state = json.loads(family("llama3").to_str())
    state["model"]["dropout"] = 0.1
    rules = cut_rules(Tokenizer.from_str(json.dumps(state)))
    assert not rules.any
    assert rules.reasons == ("the model drops merges at random",)


def test_special_tokens_that_are_not_recognised_are_no_places_to_cut() -> None:
    tokenizer = Tokenizer.from_str(family("llama3").to_str())
    tokenizer.encode_special_tokens = True
    assert not cut_rules(tokenizer).any


def test_a_tokenizer_without_added_tokens_and_steps_says_so() -> None:
    rules = cut_rules(Tokenizer(models.BPE()))
    assert not rules.any
    assert len(rules.reasons) == 2


def test_reasons_and_rules_never_hold_text_of_a_request() -> None:
    assert re.search("im_start", repr(cut_rules(family("llama3")))) is None


def test_a_safe_blank_stands_behind_a_letter_or_digit_of_the_basic_plane() -> None:
    """Of all characters, the first one of a text included."""
    cut = Segmenter(CutRules(at_blanks=True), segment_chars=1)
    for code in range(0x110000):
        letter = chr(code)
        safe = letter.isalnum() and code < 0x10000
        assert list(cut.segments(f"{letter} b")) == ([letter, " b"] if safe else [f"{letter} b"]), hex(code)
    assert list(cut.segments(" b c")) == [" b", " c"]
