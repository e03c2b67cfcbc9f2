"""The model's name in an answer, put back to what the client had asked for, however the bytes are cut.

Looks for the member `"model": "<name>"` in the raw bytes (inside a JSON string its quotes would be
escaped), so it fits documents and event streams of every API. Must not parse or hold an answer: at most
the beginning of that member waits for its rest.
"""

from __future__ import annotations

import json
import re
from typing import Final

_KEY: Final = b'"model"'
_BLANKS: Final = b" \t\r\n"
_LONGEST_GAP_BYTES: Final = 64  # white space between key and value


class ModelNameEdit:
    """Of one answer."""

    def __init__(self, written: str, wanted: str) -> None:
        """`written` by the engine, `wanted` by the client."""
        self._forms = {json.dumps(written).encode(), json.dumps(written, ensure_ascii=False).encode()}
        names = b"|".join(re.escape(form) for form in sorted(self._forms))
        gap = rb"[ \t\r\n]{0,%d}" % (_LONGEST_GAP_BYTES // 2)
        self._pattern = re.compile(b"(" + _KEY + gap + b":" + gap + b")(?:" + names + b")")
        wanted_form = json.dumps(wanted).encode()
        self._replace = lambda found: found[1] + wanted_form
        self._longest = len(_KEY) + _LONGEST_GAP_BYTES + 1 + max(map(len, self._forms))
        self._carry = b""

    def feed(self, chunk: bytes, *, end: bool) -> bytes:
        """What may go on now."""
        data = self._pattern.sub(self._replace, self._carry + chunk)
        kept = len(data) if end else self._beginning(data)
        self._carry = data[kept:]
        return data[:kept]

    def _beginning(self, data: bytes) -> int:
        """Where the member may have begun whose rest is still to come."""
        at = max(0, len(data) - self._longest)
        while (at := data.find(b'"', at)) >= 0:
            if self._may_go_on(data[at:]):
                return at
            at += 1
        return len(data)

    def _may_go_on(self, tail: bytes) -> bool:
        if len(tail) <= len(_KEY):
            return _KEY.startswith(tail)
        if not tail.startswith(_KEY):
            return False
        rest = tail[len(_KEY) :].lstrip(_BLANKS)
        if not rest.startswith(b":"):
            return not rest
        value = rest[1:].lstrip(_BLANKS)
        return any(len(value) < len(form) and form.startswith(value) for form in self._forms)
