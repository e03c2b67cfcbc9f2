"""Whether a request's model name is the pool's base model or one of its LoRA adapters.

Why it matters: an engine keys the blocks of an adapter by the adapter's name, and blocks of the base
model say nothing about an adapter's. Rule: a name known as the base model's has no adapter; every
other name stands for the adapter of that name. A base name that nobody told us of (an alias) then
matches no block at all, which is safe; a wrong claim would not be. What is known comes from the engines'
metrics pages (`model_name`) and from the configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from engine_plugin.identity import EndpointId

MAX_NAME_CHARS: Final = 512  # of a name an engine reports; a longer one is not kept


class ModelNames:
    """Names of the pool's base model. Not thread-safe."""

    def __init__(self, configured: Iterable[str] = ()) -> None:
        self._configured = frozenset(configured)
        self._reported: dict[EndpointId, str] = {}
        self._counts: Counter[str] = Counter()

    def report(self, endpoint: EndpointId, name: str | None) -> None:
        """Latest page of `endpoint`. None, a page that names no model, forgets what it said before."""
        if self._reported.get(endpoint) == name:
            return
        self.forget(endpoint)
        if name and len(name) <= MAX_NAME_CHARS:
            self._reported[endpoint] = name
            self._counts[name] += 1

    def forget(self, endpoint: EndpointId) -> None:
        name = self._reported.pop(endpoint, None)
        if name is not None:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]

    @property
    def any_known(self) -> bool:
        """False: no request that names a model can match anything."""
        return bool(self._configured or self._counts)

    def is_base(self, name: str) -> bool:
        """Whether a request for `name` is one for the base model, as one that names none is."""
        return not name or name in self._configured or name in self._counts

    def lora_name(self, name: str) -> str | None:
        """The adapter whose blocks a request for `name` can use; None: the base model's."""
        return None if self.is_base(name) else name
