"""Certificate and key of a serving port, and the authority of its clients: mounted and reloaded, or
self-signed (the picker's, too).

What is mounted and turns bad is reported and the last good kept; what is bad at start stops the start. It
knows no TLS library: everything is PEM.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

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
_T = TypeVar("_T")


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


def load_authority(file: Path) -> str:
    """Read and check a PEM file of one certificate authority or several.

    Raises:
        CertificateError: it is missing or unreadable, or holds no authority.
    """
    try:
        text = file.read_bytes()
        found = x509.load_pem_x509_certificates(text)
    except OSError as error:
        raise CertificateError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise CertificateError(f"{file}: no PEM certificate") from error
    if not any(map(_is_authority, found)):
        raise CertificateError(f"{file}: holds no certificate of an authority")
    return text.decode("ascii", "ignore")  # comments may be anything


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


class _Mounted(Generic[_T]):
    """What is read from files that are looked at on every new connection: a `stat` call each."""

    def __init__(self, what: str, files: tuple[Path, ...], read: Callable[[], _T]) -> None:
        self._what = what
        self._files = files
        self._read = read
        self._seen = self._signature()
        self.current = read()

    def changed(self) -> _T | None:
        """What is new, if anything is; None: go on with the last good."""
        signature = self._signature()
        if signature == self._seen:
            return None
        self._seen = signature
        try:
            self.current = self._read()
        except CertificateError as error:
            log.warning("%s not reloaded, the last good one stays: %s", self._what, error)
            return None
        log.info("%s reloaded from %s", self._what, self._files[0].parent)
        return self.current

    def _signature(self) -> _Signature:
        """Changes with any file. Kubernetes swaps a symlink: `stat` sees the new inode."""
        found: list[tuple[int, int, int]] = []
        for file in self._files:
            try:
                stat = file.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)


class MountedCertificate(_Mounted[KeyPair]):
    """A directory of `tls.crt` and `tls.key`. Raises CertificateError, as `load` does."""

    def __init__(self, directory: Path) -> None:
        files = (directory / CERTIFICATE_FILE, directory / KEY_FILE)
        super().__init__("certificate", files, lambda: load(directory))

    @property
    def pair(self) -> KeyPair:
        """The last good one."""
        return self.current


class MountedAuthority(_Mounted[str]):
    """A PEM file of authorities. Raises CertificateError, as `load_authority` does."""

    def __init__(self, file: Path) -> None:
        super().__init__("authority of clients", (file,), lambda: load_authority(file))
