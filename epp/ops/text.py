"""What clients chose (request ids, model names) on an operator's terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
