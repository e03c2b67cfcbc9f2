"""Where a text may be cut so that its tokens are the tokens of its parts: decided per tokenizer at load.

A tokenizer works in steps: split at added tokens, normalise each piece, split it again, split it into
words (pre-tokenizer), encode each word. A cut is exact where every step would separate the text anyway.
Three kinds of cuts are shown to be so, from the tokenizer's own JSON (docs/tokens.md has the argument):

* in front of an added token that is found in the raw text, whatever stands around it;
* in front of a blank behind a letter or digit, if normalizer, pre-tokenizer and added tokens are of
  kinds for which that is a boundary in every text;
* in front of a mark behind a letter of East Asian texts, which have no blanks, on the same conditions.

Whatever is not recognised is refused with a reason; then the text is encoded whole. It must not guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import Tokenizer

from epp.request.regex_paths import LETTERS, MARKS, BlankRule, UnprovenPattern, blank_rule, mark_rule

GPT2_PATTERN: Final = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # inside ByteLevel
)
MAX_CUT_TOKENS: Final = 512
AT_MARK: Final = re.compile(f"(?<=[{''.join(f'{first}-{last}' for first, last in LETTERS)}])[{MARKS}]")

_MODELS: Final = frozenset(("BPE", "WordPiece", "WordLevel", "Unigram"))
_NORMALIZERS: Final = frozenset(
    (
        "BertNormalizer",
        "Strip",
        "StripAccents",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Sequence",
        "Lowercase",
        "Nmt",
        "Precompiled",
        "Replace",
        "Prepend",
        "ByteLevel",
    )
)
_PRE_TOKENIZERS: Final = frozenset(
    (
        "BertPreTokenizer",
        "ByteLevel",
        "Delimiter",
        "CharDelimiterSplit",
        "Metaspace",
        "Whitespace",
        "Sequence",
        "Split",
        "Punctuation",
        "WhitespaceSplit",
        "Digits",
        "UnicodeScripts",
        "FixedLength",
    )
)
# of a text and of what follows it separately: the same, if what follows begins with U+0020
_LOCAL_NORMALIZERS: Final = frozenset(
    (
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Lowercase",
        "StripAccents",
        "BertNormalizer",
    )
)
# these write blanks around some letters, or drop letters that they take for accents
_CHANGE_BLANKS: Final = frozenset(("BertNormalizer", "StripAccents"))
_REMOVE_WHITE_SPACE: Final = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))
_POST_PROCESSORS: Final = frozenset(
    (
        "ByteLevel",
        "TemplateProcessing",
        "BertProcessing",
        "RobertaProcessing",
    )
)


class Unsafe(ValueError):
    """This kind of cut cannot be shown to be exact; the message says why."""


@dataclass(frozen=True, slots=True)
class CutRules:
    """Cuts that are exact for one tokenizer. `reasons` says what is missing, for the log."""

    tokens: tuple[str, ...] = field(default=(), repr=False)  # a cut may be made in front of these
    at_blanks: bool = False  # and in front of a blank behind a letter or digit
    at_marks: bool = False  # and in front of a mark behind a letter (`regex_paths.MARKS`, `LETTERS`)
    reasons: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.tokens) or self.at_blanks or self.at_marks


def cut_rules(tokenizer: Tokenizer) -> CutRules:
    """What may be cut for `tokenizer`; no rules at all where nothing could be shown."""
    state = json.loads(tokenizer.to_str())
    try:
        _check_pipeline(tokenizer, state)
    except Unsafe as reason:
        return CutRules(reasons=(str(reason),))
    reasons = []
    tokens = _cut_tokens(state["added_tokens"])
    if not tokens:
        reasons.append("no added token is found in raw text, apart from others")
    at_blanks = True
    try:
        _check_added_tokens(tokenizer, state["added_tokens"])
        _check_normalizer(state)
        _check_pre_tokenizer(state)
    except Unsafe as reason:
        at_blanks = False
        reasons.append(f"not at blanks: {reason}")
    return CutRules(tokens, at_blanks, _at_marks(tokenizer, state), tuple(reasons))


# --- both kinds ---------------------------------------------------------------------------------
def _check_pipeline(tokenizer: Tokenizer, state: Mapping[str, Any]) -> None:
    """Each step must be a function of its piece alone."""
    if tokenizer.encode_special_tokens:
        raise Unsafe("special tokens in the text are not recognised (split_special_tokens)")
    model = state["model"]
    if model.get("type") not in _MODELS:
        raise Unsafe(f"model {model.get('type')}")
    if model.get("dropout"):
        raise Unsafe("the model drops merges at random")
    for kind, known in (("normalizer", _NORMALIZERS), ("pre_tokenizer", _PRE_TOKENIZERS)):
        for step in _steps(state[kind]):
            if step.get("type") not in known:
                raise Unsafe(f"{kind} {step.get('type')}")
    for step in _steps(state["post_processor"]):
        if step.get("type") not in _POST_PROCESSORS:
            raise Unsafe(f"post-processor {step.get('type')}")
        if step["type"] == "TemplateProcessing" and sum("Sequence" in part for part in step["single"]) != 1:
            raise Unsafe("the post-processor writes the text more than once")


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A step, or the steps of a sequence, however deep."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    inner: Sequence[Mapping[str, Any]] = next(value for value in step.values() if isinstance(value, list))
    return [leaf for part in inner for leaf in _steps(part)]


# --- in front of added tokens -------------------------------------------------------------------
def _cut_tokens(added: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Added tokens whose every occurrence in a text is found, and which begin with a character that
    neither white space taken by a neighbour nor a test for word boundaries can reach."""
    raw = [token for token in added if not token["normalized"]]
    contents = [token["content"] for token in raw]
    plain = [
        token["content"]
        for token in raw
        if not (token["lstrip"] or token["single_word"]) and re.match(r"[!-/:-@\[-^`{-~]", token["content"])
    ]
    if len(contents) > MAX_CUT_TOKENS:  # the check below is quadratic
        return ()
    return tuple(content for content in plain if not any(_hides(other, content) for other in contents))


def _hides(other: str, content: str) -> bool:
    """Can an occurrence of `other` begin before `content` and reach into it, or begin there and be longer?"""
    if other != content and other.startswith(content):
        return True
    return any(other.startswith(content, at) or content.startswith(other[at:]) for at in range(1, len(other)))


# --- in front of blanks -------------------------------------------------------------------------
def _check_added_tokens(tokenizer: Tokenizer, added: Sequence[Mapping[str, Any]]) -> None:
    """No added token may reach over the cut, or look over it."""
    normalizer = tokenizer.normalizer
    for token in added:
        content = token["content"]
        forms = {content} if normalizer is None else {content, normalizer.normalize_str(content)}
        for form in forms:
            if re.search(r"\S ", form):
                raise Unsafe("an added token holds a blank")
            if token["rstrip"] and (not form or form[-1].isalnum()):
                raise Unsafe("an added token takes the white space behind its last letter")
            if token["single_word"] and form[:1].isspace():
                raise Unsafe("an added token must stand alone and begins with white space")


def _check_normalizer(state: Mapping[str, Any]) -> None:
    kinds = {step["type"] for step in _steps(state["normalizer"])}
    if unknown := kinds - _LOCAL_NORMALIZERS:
        raise Unsafe(f"normalizer {min(unknown)}")
    first = next(iter(_steps(state["pre_tokenizer"])), {}).get("type")
    if kinds & _CHANGE_BLANKS and first not in _REMOVE_WHITE_SPACE:
        raise Unsafe("the normalizer can bring blanks together, and the pre-tokenizer keeps them")


def _check_pre_tokenizer(state: Mapping[str, Any]) -> None:
    """Steps before the one that begins a word at the cut must leave both sides as they are; behind it
    every step sees the same words."""
    for step in _steps(state["pre_tokenizer"]):
        if _begins_word(step):
            return
    raise Unsafe("the pre-tokenizer does not separate words at blanks")


def _begins_word(step: Mapping[str, Any]) -> bool:
    """False: it leaves the cut to later steps, and does the same left and right of it."""
    kind = step["type"]
    if kind in _REMOVE_WHITE_SPACE:
        return True
    if kind == "Digits":
        return False
    if kind == "Metaspace" and step.get("split", True):
        return True
    if kind == "ByteLevel" and step.get("use_regex", True):
        return _pattern_begins_word(GPT2_PATTERN)  # add_prefix_space: not where a piece begins with a blank
    if kind == "Punctuation" and step["behavior"] in ("Isolated", "Removed", "Contiguous"):
        return False  # neither side of the cut is a mark
    if kind == "Split" and step["behavior"] in ("Isolated", "Removed") and "Regex" in step["pattern"]:
        return _pattern_begins_word(step["pattern"]["Regex"])
    raise Unsafe(f"pre-tokenizer {kind} in this form")


# --- in front of marks --------------------------------------------------------------------------
def _at_marks(tokenizer: Tokenizer, state: Mapping[str, Any]) -> bool:
    """Stricter than for blanks: only what byte-level tokenizers are made of."""
    if {step["type"] for step in _steps(state["normalizer"])} - {"NFC"}:
        return False  # others may leave something else behind a letter
    for token in state["added_tokens"]:
        content = token["content"]
        normalizer = tokenizer.normalizer
        forms = {content} if normalizer is None else {content, normalizer.normalize_str(content)}
        if any(AT_MARK.search(form) or (token["single_word"] and form[:1] in MARKS) for form in forms):
            return False
    try:
        return any(_begins_word_at_marks(step) for step in _steps(state["pre_tokenizer"]))
    except Unsafe:
        return False


def _begins_word_at_marks(step: Mapping[str, Any]) -> bool:
    """See `_begins_word`."""
    kind = step["type"]
    if kind == "Digits":
        return False
    if kind == "ByteLevel" and step.get("use_regex", True) and not step.get("add_prefix_space", True):
        return _pattern_begins_word(GPT2_PATTERN, mark_rule)
    if kind == "Split" and step["behavior"] in ("Isolated", "Removed") and "Regex" in step["pattern"]:
        return _pattern_begins_word(step["pattern"]["Regex"], mark_rule)
    raise Unsafe(f"pre-tokenizer {kind} in this form")


def _pattern_begins_word(pattern: str, rule_of: Callable[[str], BlankRule] = blank_rule) -> bool:
    try:
        rule = rule_of(pattern)
    except UnprovenPattern as reason:
        raise Unsafe(f"pre-tokenizer pattern: {reason}") from reason
    if rule is BlankRule.JOINS:
        raise Unsafe("pre-tokenizer pattern may join a letter and the blank behind it")
    return rule is BlankRule.BEGINS
