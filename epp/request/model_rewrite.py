"""The model a request names, exchanged in its bytes; everything else stays as the client wrote it."""

from __future__ import annotations

import json
from typing import Final

import orjson

from sidecar.json_bytes import find_values, replaced

_MODEL: Final = ("model",)


def rewrite_model(body: bytes, name: str) -> bytes | None:
    """`body`, a JSON object, with `name` as its model; None: there is no model to exchange.

    Blocks: looks at every token of a long body.
    """
    try:
        if not isinstance(orjson.loads(body), dict):
            return None
    except orjson.JSONDecodeError:
        return None
    span = find_values(body, {_MODEL}).get(_MODEL)
    if span is None or body[span[0] : span[0] + 1] != b'"':
        return None
    return replaced(body, {span: json.dumps(name).encode()})
