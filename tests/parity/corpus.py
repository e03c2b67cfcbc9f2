"""The parity corpus: requests over all shapes for every family, made the same way each time.

A request is what a client sends: path and JSON body. Names are stable: records refer to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from tests.parity import chats, found, odd, others
from tests.parity.families import FAMILIES

MODEL: Final = "m"
CHAT: Final = "/v1/chat/completions"
ODD_FAMILIES: Final = ("chatml", "mistral", "parts")
# what every chat sends besides: the templates that print today's date must print the same one tomorrow
FIXED_DATE: Final = {"current_date": "2026-01-01"}


@dataclass(frozen=True, slots=True)
class Case:
    """One request of the corpus; `body` is what the client sends, byte for byte."""

    family: str
    name: str
    path: str
    body: bytes

    @property
    def key(self) -> str:
        return f"{self.family}{self.path.removeprefix('/v1')}/{self.name}"


def cases(family: str) -> list[Case]:
    """All requests for one family."""
    return list(itertools.chain(_chats(family), _others(family)))


def all_cases() -> list[Case]:
    return [case for family in FAMILIES for case in cases(family.name)]


def _chats(family: str) -> Iterator[Case]:
    shapes = itertools.chain(
        chats.plain_shapes(), chats.tool_shapes(), chats.switch_shapes(), chats.random_chats(family, 4)
    )
    for name, fields in shapes:
        given: dict[str, Any] = {"model": MODEL, **with_fixed_date(family, CHAT, fields)}
        yield Case(family, name, CHAT, orjson.dumps(given))


def _others(family: str) -> Iterator[Case]:
    shapes = [*others.shapes(), *found.shapes(), *(odd.shapes() if family in ODD_FAMILIES else ())]
    for path, name, fields in shapes:
        given = {"model": MODEL, **with_fixed_date(family, path, fields)}
        yield Case(family, name, path, orjson.dumps(given))


def with_fixed_date(family: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    if family != "harmony" or path == others.COMPLETIONS:
        return fields
    return {**fields, "chat_template_kwargs": FIXED_DATE | (fields.get("chat_template_kwargs") or {})}
