"""The handshake's decisions, without I/O: who may speak, who is compatible, who is refused and why.

With a key, both sides prove that they hold it: HMAC-SHA256 over the role and both hello frames (so over
both nonces, identities and versions). It fails closed: a keyed side refuses an unkeyed one. Identities are
compared only after the proofs, field by field, by both sides for themselves.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final, Literal

from engine_plugin import protocol
from engine_plugin.identity import COMPARED_FIELDS, PeerIdentity
from engine_plugin.protocol import FrameError, Hello, RefusalReason

Role = Literal["client", "server"]
_INSTANCE: Final = re.compile(r"[0-9a-f]{8,64}")
_MAX_TEXT: Final = 256
_CONTEXT: Final = b"kvpull-p2p-proof-v1"
_KNOWN_DETAILS: Final = frozenset(COMPARED_FIELDS) | {"instance"}


@dataclass(frozen=True, slots=True)
class Refusal(Exception):
    """This handshake ends here. `detail` names the identity field for `identity`."""

    reason: RefusalReason
    detail: str = ""

    @property
    def label(self) -> str:
        """Bounded label for metrics: the field's name, or the reason."""
        return self.detail if self.reason == "identity" and self.detail in _KNOWN_DETAILS else self.reason


def hello(identity: PeerIdentity, key: bytes | None) -> Hello:
    """Our first frame, with a fresh nonce."""
    return Hello(
        magic=protocol.MAGIC,
        protocol=protocol.VERSION,
        identity=identity,
        nonce=secrets.token_bytes(protocol.NONCE_BYTES),
        keyed=key is not None,
    )


def check_form(identity: PeerIdentity) -> None:
    """An identity goes into logs and labels: hex instance, short printable texts. Raises FrameError."""
    texts = (identity.model, identity.revision, identity.dtype, identity.layout, identity.hash_algo)
    printable = all(len(text) <= _MAX_TEXT and text.isprintable() for text in (*texts, identity.seed_fp))
    if not printable or _INSTANCE.fullmatch(identity.instance) is None:
        raise FrameError("the hello's identity is malformed")


def check_hello(theirs: Hello, key: bytes | None) -> None:
    """Version and whether both sides require a proof. Raises Refusal."""
    check_form(theirs.identity)
    if theirs.protocol != protocol.VERSION:
        raise Refusal("protocol", f"protocol {theirs.protocol} against {protocol.VERSION}")
    if theirs.keyed != (key is not None):
        raise Refusal("auth", "one side has a peer key, the other none")


def proof(key: bytes, role: Role, client: Hello, server: Hello) -> bytes:
    """The MAC that `role` sends."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (_CONTEXT, role.encode(), protocol.encode(client), protocol.encode(server)):
        mac.update(len(part).to_bytes(4, "big") + part)
    return mac.digest()


def check_proof(mac: bytes, key: bytes, role: Role, client: Hello, server: Hello) -> None:
    """Constant-time comparison. Raises Refusal."""
    if not hmac.compare_digest(mac, proof(key, role, client, server)):
        raise Refusal("auth", "the peer's proof is wrong: the two sides have different peer keys")


def check_identity(ours: PeerIdentity, theirs: PeerIdentity) -> None:
    """Raises Refusal with the first differing field."""
    field = ours.mismatch(theirs)
    if field is not None:
        raise Refusal("identity", field)
