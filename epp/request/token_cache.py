"""Token ids of texts seen before, by a keyed hash of the text: the memory behind incremental tokenising.

Bounded in bytes, least recently used first out, shared by all conversations and all threads. It holds
ids, never text. The hash is cryptographic (SHA-256, 128 bits of it, over a key of this process first), so
nobody can prepare a text that gets another text's ids.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from typing import Final

DEFAULT_CACHE_BYTES: Final = 256 << 20
ENTRY_OVERHEAD_BYTES: Final = (
    288  # key, value header, dictionary slot and node; of resident memory, rounded up
)
_DIGEST_BYTES: Final = 16
_KEY_BYTES: Final = 32


class TokenCache:
    """Ids are kept as they lie in memory: native uint32."""

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        """`max_bytes` 0: nothing is kept."""
        self._max_bytes = max_bytes
        key = secrets.token_bytes(_KEY_BYTES)
        # half the time of blake2b where the processor has SHA instructions
        self._keyed = {special: hashlib.sha256(key + bytes([special])) for special in (False, True)}
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def digest(self, text: bytes, add_special_tokens: bool) -> bytes:
        """The name in this cache of a text that is encoded in this way."""
        hasher = self._keyed[add_special_tokens].copy()
        hasher.update(text)
        return hasher.digest()[:_DIGEST_BYTES]

    def get(self, digest: bytes) -> bytes | None:
        with self._lock:
            ids = self._entries.get(digest)
            if ids is not None:
                self._entries.move_to_end(digest)
            return ids

    def put(self, digest: bytes, ids: bytes) -> None:
        """Keep `ids`; drops what was used longest ago. An entry larger than the cache is not kept."""
        size_bytes = len(ids) + ENTRY_OVERHEAD_BYTES
        if size_bytes > self._max_bytes:
            return
        with self._lock:
            if digest in self._entries:
                return
            self._entries[digest] = ids
            self._size_bytes += size_bytes
            while self._size_bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._size_bytes -= len(dropped) + ENTRY_OVERHEAD_BYTES
