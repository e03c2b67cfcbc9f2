"""Names that may become labels: a bounded number of them, the rest is `other`. Forgets nothing."""

from __future__ import annotations

from typing import Final

from epp.core.types import Endpoint

OTHER: Final = "other"
MAX_NAME_CHARS: Final = 128


class LabelNames:
    """The first `limit` names that are admitted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def admit(self, name: str) -> str:
        """The label for `name`, which from now on has one of its own if there is room."""
        if name in self._names or not name:
            return name
        if len(self._names) >= self._limit or len(name) > MAX_NAME_CHARS:
            return OTHER
        self._names.add(name)
        return name

    def known(self, name: str) -> str:
        """The label for `name`, without making room for it."""
        return name if not name or name in self._names else OTHER


def endpoint_name(endpoint: Endpoint) -> str:
    """As the reference names an endpoint: the pod, and its rank where there are several."""
    pod, rank = endpoint.id
    return f"{pod}-rank-{rank}" if rank else pod
