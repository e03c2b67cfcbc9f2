"""Which characters can follow one another inside a match of a pre-tokenizer's regular expression.

Why: a text may be cut before a blank only if no match of the pattern can hold a visible character
with a blank (U+0020) right behind it; the same for the marks of East Asian texts (`MARKS`) behind one of
their letters (`LETTERS`). That is decided from the pattern alone: its atoms (one
character each) and which atom may follow which (Glushkov's construction). Everything is
over-approximated; syntax that is not understood here is `UnprovenPattern`, never a guess. This
module must not run patterns.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final


class UnprovenPattern(ValueError):
    """The pattern has syntax about which nothing is shown here."""


# in Unicode since 3.0, so that all tables agree: category Po, and Lo (Han, Hiragana, Katakana, Hangul)
MARKS: Final = "、。！，：；？"
LETTERS: Final = (("\u4e00", "\u9fa5"), ("\u3041", "\u3096"), ("\u30a1", "\u30fa"), ("\uac00", "\ud7a3"))


@dataclass(frozen=True, slots=True)
class _Atom:
    """One character of a match: may it be U+0020, may it be a character that is no white space? May it be one
    of `MARKS`, of `LETTERS`, and may it be each of them?"""

    blank: bool
    visible: bool
    mark: bool = False
    every_mark: bool = False
    letter: bool = False
    every_letter: bool = False

    def negated(self, *, blank: bool, visible: bool) -> _Atom:
        return _Atom(
            blank, visible, not self.every_mark, not self.mark, not self.every_letter, not self.letter
        )


@dataclass(slots=True)
class _Part:
    """A piece of a pattern: atoms that may begin and end it, and whether it may be empty."""

    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    nullable: bool = True
    looks_ahead: bool = False
    single: bool = True  # each of its atoms may stand alone, not only twice or more


_BLANKLESS_PROPERTIES: Final = frozenset("LMNPSC")  # first letters of categories without U+0020
# of these scripts: U+0020 is in none of them
_SCRIPTS: Final = frozenset(("Han", "Hiragana", "Katakana", "Hangul", "Latin", "Cyrillic", "Greek", "Arabic"))
_ESCAPED_SPACE: Final = frozenset("rntfv")
_MAX_PATTERN_CHARS: Final = 4096


class BlankRule(enum.Enum):
    """What a pattern does with a blank that has a visible character in front of it, or a mark that has a
    letter there.

    JOINS: a match may hold both, nothing is shown. APART: no match holds both, and matching the text
    up to the blank and from the blank on gives the same matches as matching it whole; between matches
    there may be gaps. BEGINS: APART, and a match begins at the blank.
    """

    JOINS = "joins"
    APART = "apart"
    BEGINS = "begins"


def blank_rule(pattern: str) -> BlankRule:
    """Sound because every path of the search through `text` is a path through `text[:cut]` or
    `text[cut:]`: at the cut, where one sees a blank and the other the end, no atom behind a visible
    character can match, and no look-ahead that is understood here tells the two apart.

    Raises:
        UnprovenPattern: syntax that is not understood.
    """
    return _Parser(pattern).rules()[0]


def mark_rule(pattern: str) -> BlankRule:
    """The same of a mark behind a letter (`MARKS`, `LETTERS`).

    Raises:
        UnprovenPattern: syntax that is not understood.
    """
    return _Parser(pattern).rules()[1]


class _Parser:
    """Recursive descent over the syntax that tokenizer files use."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise UnprovenPattern("a very long pattern")
        self._text = pattern
        self._at = 0
        self._atoms: list[_Atom] = []
        self._follow: set[tuple[int, int]] = set()
        self._lone_blank = False  # a top-level alternative that matches a single blank, whatever follows
        self._lone_mark = False  # or any single mark
        self._looks_at_marks = False  # a look-ahead behind a letter tells a mark from the end of the text

    def rules(self) -> tuple[BlankRule, BlankRule]:
        """Of blanks, and of marks."""
        whole = self._alternatives(top=True)
        if self._at != len(self._text):
            raise UnprovenPattern("an unbalanced bracket")
        if whole.nullable:
            raise UnprovenPattern("a pattern that matches nothing at all")
        follow = [(self._atoms[a], self._atoms[b]) for a, b in self._follow]
        blanks_join = any(before.visible and after.blank for before, after in follow)
        marks_join = self._looks_at_marks or any(before.letter and after.mark for before, after in follow)
        return _rule(blanks_join, self._lone_blank), _rule(marks_join, self._lone_mark)

    # --- syntax -----------------------------------------------------------------------------------
    def _alternatives(self, *, top: bool = False) -> _Part:
        parts = []
        while True:
            begin = len(self._atoms)
            part = self._sequence()
            parts.append(part)
            if top and len(self._atoms) == begin + 1 and part.single and not part.looks_ahead:
                # an atom that may also be visible only *claims* the blank; `\\s` does match it
                self._lone_blank |= self._atoms[begin].blank and not self._atoms[begin].visible
            if top and part.single and not part.looks_ahead:
                self._lone_mark |= any(self._atoms[atom].every_mark for atom in part.first & part.last)
            if self._peek() != "|":
                return _Part(
                    set().union(*(p.first for p in parts)),
                    set().union(*(p.last for p in parts)),
                    any(p.nullable for p in parts),
                    any(p.looks_ahead for p in parts),
                    all(p.single for p in parts),
                )
            self._at += 1

    def _sequence(self) -> _Part:
        whole = _Part()
        while (sign := self._peek()) not in ("", "|", ")"):
            if self._text.startswith(("(?=", "(?!"), self._at):
                seen = self._lookahead()
                behind_letter = whole.nullable or any(self._atoms[atom].letter for atom in whole.last)
                self._looks_at_marks |= seen.mark and behind_letter
                whole.looks_ahead = True
                continue
            part = self._group() if sign == "(" else self._leaf()
            self._quantify(part)
            self._link(whole.last, part.first)
            whole.first |= part.first if whole.nullable else set()
            whole.last = part.last | (whole.last if part.nullable else set())
            whole.nullable &= part.nullable
            whole.looks_ahead |= part.looks_ahead
            whole.single &= part.single
        return whole

    def _link(self, before: Iterable[int], after: Iterable[int]) -> None:
        behind = tuple(after)
        self._follow.update((a, b) for a in before for b in behind)

    def _group(self) -> _Part:
        for opening in ("(?:", "(?i:", "(?>", "("):
            if self._text.startswith(opening, self._at):
                break
        if opening == "(" and self._text.startswith("(?", self._at):
            raise UnprovenPattern("a group of an unknown kind")
        self._at += len(opening)
        part = self._alternatives()
        self._expect(")")
        return part

    def _lookahead(self) -> _Atom:
        """Only over one character, and one that treats a blank like the end of the text."""
        self._at += 3
        known, before = len(self._atoms), set(self._follow)
        self._leaf()
        self._expect(")")
        atom = self._atoms.pop()
        if len(self._atoms) != known or self._follow != before or atom.blank:
            raise UnprovenPattern("a look-ahead that can see a blank")
        return atom

    def _quantify(self, part: _Part) -> None:
        sign = self._peek()
        if sign == "{":
            least, repeats = self._counts()
        elif sign in ("?", "*", "+"):
            self._at += 1
            least, repeats = (1 if sign == "+" else 0), sign != "?"
        else:
            return
        after = self._peek()
        if after in ("?", "+"):  # lazy, possessive, or (behind a count) once more: all of it is allowed for
            self._at += 1
            repeats, least = True, (0 if after == "?" else least)
        if repeats:
            self._link(part.last, part.first)
        part.nullable |= least == 0
        part.single &= least <= 1

    def _counts(self) -> tuple[int, bool]:
        """Of `{least}`, `{least,}` or `{least,most}`: least, and whether more than one is allowed."""
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, self._at + 1)].partition(",")
        if not (low.isdecimal() and (high.isdecimal() or not high)):
            raise UnprovenPattern("a quantifier")
        self._at = end + 1
        return int(low), bool(comma) or int(low) > 1

    def _leaf(self) -> _Part:
        atom = self._class() if self._peek() == "[" else self._character()
        self._atoms.append(atom)
        number = len(self._atoms) - 1
        return _Part({number}, {number}, nullable=False)

    def _character(self) -> _Atom:
        sign = self._take()
        if sign == "\\":
            return self._escape()
        if sign in "^$.()[]{}*+?|":
            raise UnprovenPattern(f"{sign!r} in a pattern")
        return _literal(sign)

    def _escape(self) -> _Atom:
        sign = self._take()
        if sign in ("p", "P"):
            return self._property(negated=sign == "P")
        if sign in _ESCAPED_SPACE:
            return _Atom(blank=False, visible=False)
        if sign == "s":
            return _Atom(blank=True, visible=False)
        if sign in ("S", "d", "w"):
            marks, letters = sign == "S", sign != "d"
            return _Atom(False, True, marks, marks, letters, letters)
        if sign.isascii() and not sign.isalnum():
            return _literal(sign)
        raise UnprovenPattern(f"the escape \\{sign}")

    def _property(self, *, negated: bool) -> _Atom:
        if self._take() != "{":
            raise UnprovenPattern("a property without braces")
        end = self._text.find("}", self._at)
        name = self._text[self._at : end] if end > 0 else ""
        self._at = end + 1
        if name in _SCRIPTS:
            found = _Atom(False, True, mark=True, letter=True)  # some of them: over-approximated
        elif 0 < len(name) <= 2 and name[0] in _BLANKLESS_PROPERTIES:
            marks, letters = name[0] == "P", name[0] == "L"
            found = _Atom(False, True, marks, name in ("P", "Po"), letters, name in ("L", "Lo"))
        else:
            raise UnprovenPattern("an unknown property")
        return found.negated(blank=True, visible=True) if negated else found

    def _class(self) -> _Atom:
        """`[...]`: members may be literals, ranges and escapes; no nesting, no set operations."""
        self._expect("[")
        negated = self._peek() == "^"
        self._at += negated
        members: list[_Atom] = []
        while self._peek() != "]" or not members:
            if self._peek() in ("[", "]", "") or self._text.startswith("&&", self._at):
                raise UnprovenPattern("a nested class")
            members.append(self._member())
        self._at += 1
        found = _Atom(
            any(m.blank for m in members),
            any(m.visible for m in members),
            any(m.mark for m in members),
            any(m.every_mark for m in members),
            any(m.letter for m in members),
            any(m.every_letter for m in members),
        )
        # a blank is kept out only by a member that surely is one: `\s` or a blank itself
        sure_blank = any(m.blank and not m.visible for m in members)
        return found.negated(blank=not sure_blank, visible=True) if negated else found

    def _member(self) -> _Atom:
        low = self._text[self._at]
        atom = _literal(self._take()) if low != "\\" else self._take_escape()
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return atom
        self._at += 1
        high = self._take()
        if low == "\\" or high == "\\" or high < low:
            raise UnprovenPattern("a range with an escape")
        letter = any(low <= last and first <= high for first, last in LETTERS)
        return _Atom(low <= " " <= high, True, any(low <= mark <= high for mark in MARKS), letter=letter)

    def _take_escape(self) -> _Atom:
        self._at += 1
        return self._escape()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        sign = self._peek()
        if not sign:
            raise UnprovenPattern("an unfinished pattern")
        self._at += 1
        return sign

    def _expect(self, sign: str) -> None:
        if self._take() != sign:
            raise UnprovenPattern("an unbalanced bracket")


def _literal(sign: str) -> _Atom:
    letter = any(first <= sign <= last for first, last in LETTERS)
    return _Atom(sign == " ", not sign.isspace(), sign in MARKS, letter=letter)


def _rule(joins: bool, lone: bool) -> BlankRule:
    if joins:
        return BlankRule.JOINS
    return BlankRule.BEGINS if lone else BlankRule.APART
