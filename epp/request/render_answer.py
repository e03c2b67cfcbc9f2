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


class _Generate(msgspec.Struct):
    """The fields that matter; everything else is skipped without being built."""

    token_ids: list[int]
    features: msgspec.Raw = msgspec.Raw(b"null")


_DECODER: Final = msgspec.json.Decoder(_Generate | list[_Generate])


def read_token_ids(answer: bytes) -> array[int] | None:
    """Token ids, of type code "I". None: the prompt has parts besides text, whose hashes are not here.

    Raises:
        RenderFault: no such answer.
    """
    try:
        decoded = _DECODER.decode(answer)
        if isinstance(decoded, list):
            (decoded,) = decoded
        if bytes(decoded.features) != b"null":
            return None
        ids = array("I", decoded.token_ids)
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise RenderFault("answer") from error
    if not ids:
        raise RenderFault("answer")
    return ids
