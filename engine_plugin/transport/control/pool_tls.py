"""TLS 1.3 of the control channel, from the pool's peer key alone: who holds the key is a peer, nobody else.

Both sides derive the same Ed25519 key and the same self-signed certificate from the peer key. In the TLS
handshake each proves that it has the private key, and each trusts that one certificate, so authentication is
mutual and what follows is encrypted with keys that nobody can derive later from the peer key. No session is
resumed, so every connection proves anew. Who dials us sees the certificate and could try passwords against
it: a guess costs an scrypt, but the peer key should be random all the same.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

MIN_KEY_BYTES: Final = 16
_CONTEXT: Final = b"kvpull-p2p-tls-v2"
_FROM: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # no well-defined end
_SCRYPT_COST: Final = 1 << 14  # 16 MiB and some 40 ms, once per start


@dataclass(frozen=True, slots=True)
class PoolTls:
    """Contexts of the two roles; both present and demand the pool's certificate."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def derive(cls, peer_key: bytes) -> PoolTls:
        """Raises ValueError for a key that is too short."""
        if len(peer_key) < MIN_KEY_BYTES:
            raise ValueError(f"a peer key has at least {MIN_KEY_BYTES} bytes")
        seed = hashlib.scrypt(peer_key, salt=_CONTEXT, n=_SCRYPT_COST, r=8, p=1, dklen=32)
        key = Ed25519PrivateKey.from_private_bytes(seed)
        certificate = _certificate(key)
        server = _context(ssl.PROTOCOL_TLS_SERVER, key, certificate)
        server.num_tickets = 0
        client = _context(ssl.PROTOCOL_TLS_CLIENT, key, certificate)
        return cls(server, client)


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


def _context(role: int, key: Ed25519PrivateKey, certificate: x509.Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(role)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # there are no names: the certificate itself is what is trusted
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate.public_bytes(Encoding.DER))
    _load(context, key, certificate)
    return context


def _load(context: ssl.SSLContext, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
    """`ssl` loads keys from files only: one in memory, without a name, closed at once."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.memfd_create("pool-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(private + certificate.public_bytes(Encoding.PEM))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
