"""How often heads of prompts come back: a decaying count by head, bounded. Pure; `now_s` is an argument.

A head is the first tokens of a prompt with everything that keeps caches apart (model, adapter, salt), kept as
a keyed digest only.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from epp.core.types import SchedulingRequest

MAX_HEADS = 4_096


@dataclass(slots=True)
class _Heat:
    requests: float = 0.0  # decayed to `at_s`
    at_s: float = 0.0


class HotPrefixes:
    """The `MAX_HEADS` heads seen last."""

    def __init__(self, head_tokens: int, window_s: float) -> None:
        """`window_s`: time in which a request's weight falls to 1/e."""
        self._head_tokens, self._window_s = head_tokens, window_s
        self._heads: OrderedDict[bytes, _Heat] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heads)

    def head_of(self, request: SchedulingRequest) -> bytes | None:
        """None: the prompt is shorter than a head, or not known exactly."""
        if request.token_ids is None or request.prompt_tokens < self._head_tokens:
            return None
        digest = hashlib.blake2b(digest_size=16)
        for text in (request.model, request.lora_name or "", request.cache_salt or ""):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        digest.update(array("q", request.token_ids[: self._head_tokens]).tobytes())
        return digest.digest()

    def heat(self, head: bytes, now_s: float) -> float:
        """Requests of about the last `window_s`, this one not counted."""
        heat = self._heads.get(head)
        return 0.0 if heat is None else heat.requests * self._decay(heat, now_s)

    def add(self, head: bytes, now_s: float) -> None:
        """One more request."""
        heat = self._heads.get(head)
        if heat is None:
            heat = self._heads[head] = _Heat(at_s=now_s)
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        self._heads.move_to_end(head)
        heat.requests = heat.requests * self._decay(heat, now_s) + 1.0
        heat.at_s = now_s

    def _decay(self, heat: _Heat, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - heat.at_s) / self._window_s)
