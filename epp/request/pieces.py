"""Stand-ins for tokens where no tokenizer is: the prompt's text in pieces of four bytes.

For guesses only (`approx-prefix-cache-producer`, load in tokens), never for what an engine holds. Equal
heads of two prompts make equal heads of pieces, so a conversation that goes on keeps its prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

import orjson

from epp.request.prompts import ChatPrompt, Prompt, TokenPrompt

PIECE_BYTES: Final = 4
MAX_PIECES: Final = 1 << 17  # of one prompt: 512 KiB of text


def prompt_pieces(prompt: Prompt) -> array[int] | None:
    """At most `MAX_PIECES`; None for token ids, which need no stand-in."""
    if isinstance(prompt, TokenPrompt):
        return None
    most = MAX_PIECES * PIECE_BYTES
    text = bytearray()
    parts = _chat_parts(prompt) if isinstance(prompt, ChatPrompt) else _text_parts(prompt.text)
    for part in parts:
        text += part[: most - len(text)]
        if len(text) >= most:
            break
    pieces = array("I")
    pieces.frombytes(bytes(text[: len(text) // PIECE_BYTES * PIECE_BYTES]))
    return pieces


def _text_parts(text: str) -> Iterator[bytes]:
    yield text[: MAX_PIECES * PIECE_BYTES].encode("utf-8", "surrogatepass")


def _chat_parts(prompt: ChatPrompt) -> Iterator[bytes]:
    """Tools come first, as templates put them."""
    for item in (prompt.tools, *prompt.messages):
        try:
            yield orjson.dumps(item)
        except (TypeError, orjson.JSONEncodeError):  # a lone surrogate, say: the pieces end here
            return
