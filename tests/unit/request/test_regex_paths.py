"""What a pre-tokenizer pattern does with a blank behind a letter; compared with the real matcher."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from epp.request.cut_rules import GPT2_PATTERN
from epp.request.regex_paths import BlankRule, UnprovenPattern, blank_rule, mark_rule
from tests.unit.request.families import GPT4, O200K, QWEN

KNOWN = [GPT2_PATTERN, GPT4, QWEN, O200K]


@pytest.mark.parametrize("pattern", KNOWN)
def test_the_patterns_in_use_begin_a_word_at_the_blank(pattern: str) -> None:
    assert blank_rule(pattern) is BlankRule.BEGINS


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        (r"\p{N}{1,3}", BlankRule.APART),
        (r"[一-龥]+", BlankRule.APART),
        (r"\w+|\s\s", BlankRule.APART),
        (r"\w+|\s{2,}", BlankRule.APART),
        (r"\w+|[^\n]", BlankRule.APART),
        (r"\w+|\s+(?!\S)", BlankRule.APART),
        (r"\w+|\s", BlankRule.BEGINS),
        (r" ?\w+| +", BlankRule.BEGINS),
        (r"\w+ ?|\s+", BlankRule.JOINS),
        (r"\S+\s+|\s", BlankRule.JOINS),
        (r"[^\r]+|\s", BlankRule.JOINS),
        (r"(?: ?\w+)+|\s", BlankRule.JOINS),
        (r"(?: ?x){2}|\s", BlankRule.JOINS),
        (r"(?: ?x){1}+|\s", BlankRule.JOINS),
        (r"(?:x|\s)++|\s", BlankRule.JOINS),
        (r"\w(?!\S)\s|\s", BlankRule.JOINS),
        (r"x\P{L}|\s", BlankRule.JOINS),
        (r"x[!-~ -a]|\s", BlankRule.JOINS),
        (r"\p{L}(?:,*)[\s]|\s", BlankRule.JOINS),
    ],
)
def test_rules(pattern: str, rule: BlankRule) -> None:
    assert blank_rule(pattern) is rule


@pytest.mark.parametrize(
    "pattern",
    [
        r"\b\w+|\s",
        r"^\w|\s",
        r"(?<=a)b|\s",
        r"(?=ab)a|\s",
        r"a(?! )|\s",
        r"a(?!\s)|\s",
        r".+|\s",
        r"(a)\1|\s",
        r"[a&&b]|\s",
        r"[[a]b]|\s",
        r"\p{Z}|\s",
        r"\pL|\s",
        r"\h|\s",
        r"(?x)a|\s",
        r"a*",
        r"(a|\s",
        r"a)|\s",
        r"a{,3}|\s",
        "[a",
        "a|\\",
        "",
        "x" * 5000,
    ],
)
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(UnprovenPattern):
        blank_rule(pattern)


@pytest.mark.parametrize("pattern", KNOWN)
def test_the_patterns_in_use_begin_a_word_at_the_mark(pattern: str) -> None:
    assert mark_rule(pattern) is BlankRule.BEGINS


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        (r"\p{N}{1,3}", BlankRule.APART),
        (r"[一-龥]+", BlankRule.APART),
        (r"\p{L}+|\p{P}{2}", BlankRule.APART),
        (r"\p{L}+|\p{P}(?!\S)", BlankRule.APART),
        (r"\p{L}+|[。！]", BlankRule.APART),
        (r"\p{L}+|\p{P}", BlankRule.BEGINS),
        (r"\p{L}+| ?[^\s\p{L}]+", BlankRule.BEGINS),
        (r"[^\p{L}\p{N}]?\p{L}+|\p{P}+", BlankRule.BEGINS),
        (r"\p{L}+\p{P}|\p{P}", BlankRule.JOINS),
        (r"\w+[^\s]|\p{P}", BlankRule.JOINS),
        (r"文。|\p{P}", BlankRule.JOINS),
        (r"\p{Han}\S|\p{P}", BlankRule.JOINS),
        (r"\P{N}\P{N}|\p{P}", BlankRule.JOINS),
        (r"[一-龥][、-。]|\p{P}", BlankRule.JOINS),
        (r"\p{L}(?!\S)|\p{P}", BlankRule.JOINS),
        (r"(?!\S)\s|\p{P}", BlankRule.JOINS),
        (r"\s+(?!\S)|\p{L}|\p{P}", BlankRule.BEGINS),
        (r"\p{L}(?!\p{L})|\p{P}", BlankRule.BEGINS),
    ],
)
def test_rules_of_marks(pattern: str, rule: BlankRule) -> None:
    assert mark_rule(pattern) is rule


ATOMS = st.sampled_from(
    [r"\s", r"\S", " ", "a", r"\w", r"[^\s]", r"[^a]", r"\p{L}", r"[a ]", r"\p{N}", r"[\r\n]"]
)
SUFFIX = st.sampled_from(["", "", "?", "*", "+", "{1,3}", "{2}", "++", "*?", "(?!\\S)"])


def alternatives(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequence = st.lists(st.tuples(inner, SUFFIX).map("".join), min_size=1, max_size=3).map("".join)
    return st.lists(sequence, min_size=1, max_size=3).map("|".join)


PATTERNS = alternatives(ATOMS | alternatives(ATOMS).map(lambda inner: f"(?:{inner})"))


def words(pattern: str, text: str) -> list[str]:
    return [
        word for word, _ in pre_tokenizers.Split(Regex(pattern), behavior="isolated").pre_tokenize_str(text)
    ]


@settings(max_examples=200, deadline=None)
@given(
    PATTERNS, st.text("ab1 .\n\té", max_size=12), st.text("ab1 .\n\té", max_size=12), st.sampled_from("ab1é")
)
def test_what_is_shown_holds_for_the_real_matcher(pattern: str, left: str, right: str, letter: str) -> None:
    """Random patterns: where the rule says BEGINS, the words of both sides are the words of the whole."""
    try:
        rule = blank_rule(pattern)
    except UnprovenPattern:
        return
    head, tail = left + letter, " " + right
    if rule is BlankRule.BEGINS:
        assert words(pattern, head) + words(pattern, tail) == words(pattern, head + tail)
    elif rule is BlankRule.APART:
        parts, whole = words(pattern, head) + words(pattern, tail), words(pattern, head + tail)
        at = len(words(pattern, head))
        assert whole in (parts, [*parts[: at - 1], parts[at - 1] + parts[at], *parts[at + 1 :]])


MARK_ATOMS = st.sampled_from(
    [
        r"\s",
        r"\S",
        "中",
        "。",
        r"\w",
        r"[^\s]",
        r"[^中]",
        r"\p{L}",
        r"\p{P}",
        r"\P{L}",
        r"\p{Han}",
        r"[^\s\p{L}\p{N}]",
    ]
)
MARK_PATTERNS = alternatives(MARK_ATOMS | alternatives(MARK_ATOMS).map(lambda inner: f"(?:{inner})"))


@settings(max_examples=200, deadline=None)
@given(
    MARK_PATTERNS,
    st.text("中a1 。，あ", max_size=12),
    st.text("中a1 。，あ", max_size=12),
    st.sampled_from("中あア한"),
    st.sampled_from("。，？"),
)
def test_what_is_shown_of_marks_holds_for_the_real_matcher(
    pattern: str, left: str, right: str, letter: str, mark: str
) -> None:
    try:
        rule = mark_rule(pattern)
    except UnprovenPattern:
        return
    head, tail = left + letter, mark + right
    parts, whole = words(pattern, head) + words(pattern, tail), words(pattern, head + tail)
    if rule is BlankRule.BEGINS:
        assert parts == whole
    elif rule is BlankRule.APART:
        at = len(words(pattern, head))
        assert whole in (parts, [*parts[: at - 1], parts[at - 1] + parts[at], *parts[at + 1 :]])
