"""Passes over all the rows of a decision: compiled where built, else in Python, with equal answers.

It must not know plugins: they give columns and get columns.
"""

from __future__ import annotations

try:
    from epp.core._compiled_columns import (
        add_weighted,
        candidate_rows,
        largest,
        match_rows,
        matched_shares,
        servable_tokens,
        within_reach,
    )
except ImportError:  # no C compiler was there
    from epp.core.pure_columns import (
        add_weighted,
        candidate_rows,
        largest,
        match_rows,
        matched_shares,
        servable_tokens,
        within_reach,
    )

__all__ = [
    "add_weighted",
    "candidate_rows",
    "largest",
    "match_rows",
    "matched_shares",
    "servable_tokens",
    "within_reach",
]
