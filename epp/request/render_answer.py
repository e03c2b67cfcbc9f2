"""The answer of a render call: token ids, or what is wrong with it. A peer's words, checked before use.

Semantics: vLLM 0.32 `GenerateRequest`, one object for a chat, a list with one object for a completion.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

MAX_TOKEN_ID: Final = 2**32 - 1


class RenderFault(Exception):
    """The back end did not do its part. `reason` is stable and holds nothing of request or answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Place(msgspec.Struct):
    offset: int


class _Features(msgspec.Struct):
    """Where pictures and the like stand, by kind."""

    mm_placeholders: dict[str, list[_Place]]


class _Generate(msgspec.Struct):
    """The fields that matter; everything else is skipped without being built."""

    token_ids: list[int]
    features: _Features | None = None


_DECODER: Final = msgspec.json.Decoder(_Generate | list[_Generate])


def read_token_ids(answer: bytes) -> array[int] | None:
    """Token ids, of type code "I", up to the first picture or the like: the keys of its blocks hold more than
    tokens. None: nothing stands in front of it.

    Raises:
        RenderFault: no such answer.
    """
    try:
        decoded = _DECODER.decode(answer)
        if isinstance(decoded, list):
            (decoded,) = decoded
        ids = array("I", decoded.token_ids)
        if decoded.features is not None:
            places = decoded.features.mm_placeholders.values()
            first = min(place.offset for row in places for place in row)
            if not 0 <= first < len(ids):
                raise RenderFault("answer")
            return ids[:first] or None
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise RenderFault("answer") from error
    if not ids:
        raise RenderFault("answer")
    return ids
