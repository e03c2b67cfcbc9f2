"""Signature of the routing headers: proof that the picker, not a client, wrote them.

The picker (or a peer sidecar) and the sidecar share a key. Without one nothing is signed and the
sidecar relies on its allow-list. Pure: the clock is an argument; the key never appears in a text.
Format: `<unix s>.<hex HMAC-SHA256 over unix s, request id, destination, prefiller, source, joined by a
line feed>`. The time is part of what is signed, so a copied header cannot be made young again.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from dataclasses import dataclass

MAX_AGE_S = 60.0
MIN_KEY_BYTES = 16
_LEG_PREFIX = "leg:"  # no address begins so: a leg's signature is never valid for routing headers


class RoutingAuth(enum.StrEnum):
    """Outcome of a check; every value but VALID and OFF makes the routing headers void."""

    OFF = "off"  # no key configured
    VALID = "valid"
    MISSING = "unsigned"
    MALFORMED = "signature_malformed"
    STALE = "signature_stale"
    WRONG = "signature_wrong"

    @property
    def trusted(self) -> bool:
        """Whether the headers may be followed (as far as signatures go)."""
        return self in (RoutingAuth.OFF, RoutingAuth.VALID)


@dataclass(frozen=True, slots=True)
class RoutingClaims:
    """What is signed, each text exactly as it stands in its header; absent is empty."""

    request_id: str
    destination: str
    prefiller: str = ""
    source: str = ""

    @classmethod
    def of_leg(cls, request_id: str, destination: str, leg: str) -> RoutingClaims:
        """Claims of a leg that one sidecar sends to another."""
        return cls(request_id, destination, _LEG_PREFIX + leg)


def sign_routing(key: bytes, claims: RoutingClaims, *, now_s: float) -> str:
    """Value of `x-kvpull-routing-auth`; `now_s` is Unix time."""
    stamp = str(int(now_s))
    return f"{stamp}.{_digest(key, stamp, claims)}"


def verify_routing(
    key: bytes, value: str | None, claims: RoutingClaims, *, now_s: float, max_age_s: float = MAX_AGE_S
) -> RoutingAuth:
    """Check a header value; a stamp from the future is as stale as an old one."""
    if not value:
        return RoutingAuth.MISSING
    stamp, dot, digest = value.partition(".")
    if not dot or not (stamp.isascii() and stamp.isdigit()) or len(stamp) > 12 or not digest.isascii():
        return RoutingAuth.MALFORMED
    if not hmac.compare_digest(_digest(key, stamp, claims), digest):
        return RoutingAuth.WRONG
    return RoutingAuth.VALID if abs(now_s - int(stamp)) <= max_age_s else RoutingAuth.STALE


def load_routing_key(raw: bytes) -> bytes:
    """The key in a key file's content: without the final line end.

    Raises:
        ValueError: shorter than 16 bytes.
    """
    key = raw.rstrip(b"\r\n")
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"the routing key has {len(key)} bytes, at least {MIN_KEY_BYTES} are needed")
    return key


def _digest(key: bytes, stamp: str, claims: RoutingClaims) -> str:
    lines = (stamp, claims.request_id, claims.destination, claims.prefiller, claims.source)
    message = "\n".join(lines).encode("utf-8", "surrogateescape")
    return hmac.new(key, message, hashlib.sha256).hexdigest()
