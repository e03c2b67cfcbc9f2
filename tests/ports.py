"""Ports for programs that have to be told theirs, from below the range that the kernel hands out.

A port that was bound to 0 and closed again belongs to whoever asks next: another test, or an outgoing
connection of anything on the machine. These are only taken by those who name them.
"""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST, _LAST = (
    15_000,
    29_000,
)  # the kernel's range begins at 32,768; the local fleet uses some of those above
_HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Different ones, all free at the same time. Raises OSError: there are not so many."""
    start = random.randrange(_FIRST, _LAST)
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for offset in range(_LAST - _FIRST):
            port = _FIRST + (start - _FIRST + offset) % (_LAST - _FIRST)
            one = held.enter_context(socket.socket())
            try:
                one.bind((_HOST, port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"not {count} free ports between {_FIRST} and {_LAST}")
