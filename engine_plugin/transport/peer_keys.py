"""The pool's peer keys as a mounted Secret gives them: one a line; the first is shown to peers, each is
accepted from them.

So a key is changed without a moment in which two engines refuse each other: the new one is added below,
then moved to the top, then the old one is taken out, each step once every engine has taken up the one
before. `follow` does that in a running process: the kubelet replaces a mounted file, and nobody restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

MIN_KEY_BYTES: Final = 16
MAX_KEYS: Final = 4
FOLLOW_S: Final = 5.0

PeerKeys = tuple[bytes, ...]

log = logging.getLogger(__name__)


class TakesKeys(Protocol):
    """What new keys are handed to."""

    async def use_keys(self, keys: Sequence[bytes]) -> None:
        """From now on show the first and accept each."""
        ...


def parse_keys(content: bytes) -> PeerKeys:
    """The keys of a file, empty lines left out. Raises ValueError: it names the line, never its text."""
    lines = [(number, line.strip()) for number, line in enumerate(content.split(b"\n"), 1)]
    keys = [(number, line) for number, line in lines if line]
    if not keys:
        raise ValueError("there is no key in it")
    for number, key in keys:
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"the key in line {number} has {len(key)} bytes, and {MIN_KEY_BYTES} are needed")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} keys, at most {MAX_KEYS} are accepted at a time")
    return tuple(dict.fromkeys(key for _, key in keys))


def read_keys(path: Path) -> PeerKeys:
    """Raises OSError, or ValueError as `parse_keys`."""
    return parse_keys(path.read_bytes())


async def follow(path: Path, keys: PeerKeys, taker: TakesKeys, every_s: float = FOLLOW_S) -> None:
    """Until cancelled: hand what the file says to `taker` when it differs from `keys`, which it has now.
    What cannot be read or is no key changes nothing, and is said once."""
    told = ""
    while True:
        try:
            found = read_keys(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            if why != told:
                log.warning("peer keys in %s: %s; those in force stay", path, why)
            told = str(why)
        else:
            told = ""
            if found != keys:
                await taker.use_keys(found)
                log.info("peer keys in %s have changed: %d accepted", path, len(found))
                keys = found
        await asyncio.sleep(every_s)
