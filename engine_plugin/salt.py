"""How a cache salt is published: not in clear, yet comparable by whoever holds the pool key.

Stock engines put `cache_salt` into their KV events as it is, so whoever can subscribe learns the salts of
all tenants and with them shares their cache. Our plugin publishes a keyed digest instead; the picker makes
the same of a request's salt. Standard library only: plugin and picker use this one function.
"""

from __future__ import annotations

import hashlib
import hmac

PREFIX = "hmac-sha256:"  # no text of this form is ever looked up as a salt in clear
MIN_POOL_KEY_BYTES = 16


def published_salt(pool_key: bytes, salt: str) -> str:
    """What stands for `salt` in KV events: the prefix and HMAC-SHA256(pool key, salt) in hex."""
    raw = salt.encode("utf-8", "surrogatepass")
    return PREFIX + hmac.new(pool_key, raw, hashlib.sha256).hexdigest()


def salt_forms(pool_key: bytes | None, salt: str | None) -> tuple[str | None, ...]:
    """Every text under which an engine may have published blocks of a request with `salt`. A salt that
    a client wrote in the published form is never taken for one."""
    if salt is None or pool_key is None:
        return (salt,)
    published = published_salt(pool_key, salt)
    return (published,) if salt.startswith(PREFIX) else (salt, published)
