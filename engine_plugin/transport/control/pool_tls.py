"""TLS 1.3 of the control channel, from the pool's peer key alone: who holds the key is a peer, nobody else.

Both sides derive the same Ed25519 key and the same self-signed certificate from the peer key. In the TLS
handshake each proves that it has the private key, and each trusts that certificate (while a key is being
replaced: those of two), so authentication is mutual and what follows is encrypted with keys that nobody can
derive later from the peer key. No session is resumed, so every connection proves anew. Who dials us sees the
certificate and could try passwords against it: a guess costs an scrypt, but the peer key should be random
all the same.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from engine_plugin.transport.peer_keys import MIN_KEY_BYTES

_CONTEXT: Final = b"kvpull-p2p-tls-v2"
_FROM: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # no well-defined end
_SCRYPT_COST: Final = 1 << 14  # 16 MiB and some 40 ms, once per start
_ID_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class PoolTls:
    """Contexts of the two roles: both show the first key's certificate, and demand one of `accepted`."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    accepted: tuple[bytes, ...]  # certificates, DER, in the order of their keys

    @classmethod
    def derive(cls, *peer_keys: bytes) -> PoolTls:
        """Raises ValueError for no key, or one that is too short."""
        if not peer_keys or min(len(key) for key in peer_keys) < MIN_KEY_BYTES:
            raise ValueError(f"a peer key has at least {MIN_KEY_BYTES} bytes")
        private = [_private_key(key) for key in peer_keys]
        certificates = [_certificate(key) for key in private]
        server = _context(ssl.PROTOCOL_TLS_SERVER, private[0], certificates)
        server.num_tickets = 0
        client = _context(ssl.PROTOCOL_TLS_CLIENT, private[0], certificates)
        return cls(server, client, tuple(one.public_bytes(Encoding.DER) for one in certificates))


class PoolKeys:
    """The keys in force: asked at every new connection, replaced while sessions run.

    Attributes:
        tls: what the next connection is made with.
    """

    def __init__(self, peer_keys: Sequence[bytes]) -> None:
        """Raises ValueError as `PoolTls.derive`."""
        self.tls = PoolTls.derive(*peer_keys)

    async def replace(self, peer_keys: Sequence[bytes]) -> None:
        """From now on. The derivation, slow on purpose, runs on another thread. Raises as `__init__`."""
        self.tls = await asyncio.to_thread(PoolTls.derive, *peer_keys)

    def accepts(self, certificate: bytes | None) -> bool:
        """Whether what a peer has shown is (still) a key of the pool."""
        return certificate in self.tls.accepted

    def ids(self) -> tuple[str, ...]:
        """Names of the keys in force, the one shown first: nothing that a caller of the port does not see."""
        return tuple(hashlib.sha256(one).hexdigest()[:_ID_DIGITS] for one in self.tls.accepted)


def _private_key(peer_key: bytes) -> Ed25519PrivateKey:
    seed = hashlib.scrypt(peer_key, salt=_CONTEXT, n=_SCRYPT_COST, r=8, p=1, dklen=32)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _certificate(key: Ed25519PrivateKey) -> x509.Certificate:
    """The same bytes wherever it is made: fixed fields, and Ed25519 signs deterministically."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvpull pool")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )


def _context(role: int, key: Ed25519PrivateKey, certificates: Sequence[x509.Certificate]) -> ssl.SSLContext:
    context = ssl.SSLContext(role)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # there are no names: the certificate itself is what is trusted
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    for certificate in certificates:
        context.load_verify_locations(cadata=certificate.public_bytes(Encoding.DER))
    _load(context, key, certificates[0])
    return context


def _load(context: ssl.SSLContext, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
    """`ssl` loads keys from files only: one in memory, without a name, closed at once."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.memfd_create("pool-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(private + certificate.public_bytes(Encoding.PEM))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
