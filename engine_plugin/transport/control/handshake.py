"""The handshake's decisions, without I/O: who is compatible, who is refused and why.

Who may speak at all is decided before, by TLS (`pool_tls`), unless the transport is insecure by name: nothing
here is a secret. Identities are compared field by field, by both sides for themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from engine_plugin import protocol
from engine_plugin.identity import COMPARED_FIELDS, PeerIdentity
from engine_plugin.protocol import FrameError, Hello, RefusalReason, Role

_INSTANCE: Final = re.compile(r"[0-9a-f]{8,64}")
_MAX_TEXT: Final = 256
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


def hello(identity: PeerIdentity, role: Role = "peer") -> Hello:
    """Our first frame."""
    return Hello(magic=protocol.MAGIC, protocol=protocol.VERSION, identity=identity, role=role)


def check_form(identity: PeerIdentity) -> None:
    """An identity goes into logs and labels: hex instance, short printable texts. Raises FrameError."""
    texts = (identity.model, identity.revision, identity.dtype, identity.layout, identity.hash_algo)
    printable = all(len(text) <= _MAX_TEXT and text.isprintable() for text in (*texts, identity.seed_fp))
    if not printable or _INSTANCE.fullmatch(identity.instance) is None:
        raise FrameError("the hello's identity is malformed")


def check_hello(theirs: Hello) -> None:
    """Form and version. Raises FrameError, Refusal."""
    check_form(theirs.identity)
    if theirs.protocol != protocol.VERSION:
        raise Refusal("protocol", f"protocol {theirs.protocol} against {protocol.VERSION}")


def check_identity(ours: PeerIdentity, theirs: PeerIdentity) -> None:
    """Raises Refusal with the first differing field."""
    field = ours.mismatch(theirs)
    if field is not None:
        raise Refusal("identity", field)
