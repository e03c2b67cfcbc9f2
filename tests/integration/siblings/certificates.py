"""An authority and what it issues, as files in a directory."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAME = "kvpull-epp.test"


class Authority:
    """Signs certificates of replicas."""

    def __init__(self, name: str = "siblings") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name(name)
        builder = _builder(self._subject, self._subject, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = builder.add_extension(usage, True).sign(self._key, hashes.SHA256())

    def issue(self, directory: Path, name: str = NAME, trusts: Authority | None = None) -> Path:
        """Write tls.crt, tls.key and ca.crt (of `trusts`, else our own) into `directory`, each as a
        new inode, the way a Kubernetes mount swaps them."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _builder(_name(name), self._subject, key)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        directory.mkdir(exist_ok=True)
        put(directory, "tls.crt", _pem(certificate))
        put(directory, "tls.key", private)
        put(directory, "ca.crt", _pem((trusts or self)._certificate))
        return directory


def put(directory: Path, name: str, data: bytes) -> None:
    fresh = directory / f".{name}"
    fresh.write_bytes(data)
    os.replace(fresh, directory / name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
    )
