"""Certificate and key of a serving port: mounted and reloaded, or self-signed (the picker's, too).

A mounted pair that turns bad is reported and the last good one kept; a pair that is bad at start stops
the start. It knows no TLS library: a pair is PEM.
"""

from __future__ import annotations

import datetime as dt
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

log = logging.getLogger(__name__)

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
_VALID_FOR: Final = dt.timedelta(days=3650)
_CLOCK_SKEW: Final = dt.timedelta(hours=1)

_Signature = tuple[tuple[int, int, int], ...]


class CertificateError(ValueError):
    """A certificate or key that cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """PEM. Has no repr: a private key must not reach a log."""

    certificate: bytes
    key: bytes


def self_signed(names: tuple[str, ...] = ("localhost",)) -> KeyPair:
    """A new key and certificate (EC P-256, O=kvpull), valid from an hour ago for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "kvpull")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def load(directory: Path) -> KeyPair:
    """Read and check `tls.crt` and `tls.key`.

    Raises:
        CertificateError: a file is missing or unreadable, or key and certificate do not belong together.
    """
    try:
        pair = KeyPair((directory / CERTIFICATE_FILE).read_bytes(), (directory / KEY_FILE).read_bytes())
    except OSError as error:
        raise CertificateError(f"{error.filename}: {error.strerror}") from error
    try:
        leaf = x509.load_pem_x509_certificates(pair.certificate)[0]
    except ValueError as error:
        raise CertificateError(f"{directory / CERTIFICATE_FILE}: no PEM certificate") from error
    try:
        key = serialization.load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"{directory / KEY_FILE}: no PEM private key without password") from error
    if key.public_key() != leaf.public_key():
        raise CertificateError(
            f"{directory / KEY_FILE}: does not belong to the certificate in {CERTIFICATE_FILE}"
        )
    return pair


class MountedCertificate:
    """A directory that is looked at on every new connection: two `stat` calls."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen = self._signature()
        self.pair = load(directory)

    def changed(self) -> KeyPair | None:
        """The new pair if there is one; None: go on with the last good one."""
        signature = self._signature()
        if signature == self._seen:
            return None
        self._seen = signature
        try:
            self.pair = load(self._directory)
        except CertificateError as error:
            log.warning("certificate not reloaded, the last good one stays: %s", error)
            return None
        log.info("certificate reloaded from %s", self._directory)
        return self.pair

    def _signature(self) -> _Signature:
        """Changes with either file. Kubernetes swaps a symlink: `stat` sees the new inode."""
        found: list[tuple[int, int, int]] = []
        for name in (CERTIFICATE_FILE, KEY_FILE):
            try:
                stat = (self._directory / name).stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)
