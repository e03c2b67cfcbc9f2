"""What is known of one watch: in sync or not, how old the cache is, what went wrong last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WatchStatus:
    """Changed by the reflector, read by metrics and debug pages. Times as the reflector's clock."""

    what: str  # the selection, in words
    resource: str  # metric label
    contact_s: float | None = None  # the server last said anything at all
    synced: bool = False  # there has been a whole list
    error: str | None = None  # why the watch is interrupted now; None: it is not
    lists: int = 0
    watches: int = 0
    expired: int = 0
    failures: int = 0
    unreadable: int = 0  # objects that could not be understood, and were left out

    def age_s(self, now_s: float) -> float | None:
        """How old the cache may be; None before the first contact. With a healthy watch the server speaks
        at least every minute or two (bookmarks), so more than that means: the cache is a memory."""
        return None if self.contact_s is None else max(0.0, now_s - self.contact_s)
