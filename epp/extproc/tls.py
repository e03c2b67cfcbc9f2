"""Server certificate of the ext-proc port, for gRPC: mounted and reloaded, or self-signed.

Gateways do not verify this certificate (the pool's traffic policy says so); it is there because the
Endpoint Picker Protocol wants TLS on. Reading and reloading: `sidecar.certificates`.
"""

from __future__ import annotations

from pathlib import Path

import grpc

from epp.core.errors import ConfigError
from sidecar import certificates
from sidecar.certificates import CERTIFICATE_FILE, KEY_FILE, KeyPair, MountedCertificate, self_signed

__all__ = ["CERTIFICATE_FILE", "KEY_FILE", "CertificateError", "KeyPair", "credentials", "self_signed"]


class CertificateError(ConfigError):
    """A certificate or key that cannot be used; the message names the file."""


def credentials(cert_path: Path | None, *, reload: bool = True) -> grpc.ServerCredentials:
    """Server credentials from a mounted directory, or self-signed where there is none.

    Raises:
        CertificateError: what is mounted cannot be used.
    """
    if cert_path is None:
        return _static(self_signed())
    try:
        mounted = MountedCertificate(cert_path)
    except certificates.CertificateError as error:
        raise CertificateError(str(error)) from error
    if not reload:
        return _static(mounted.pair)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pair = mounted.changed()
        return None if pair is None else _configuration(pair)

    return grpc.dynamic_ssl_server_credentials(_configuration(mounted.pair), fetch)


def _static(pair: KeyPair) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(pair.key, pair.certificate)])


def _configuration(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])
