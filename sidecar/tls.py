"""TLS contexts of both sides of the proxy, and of metrics pages.

The listening side takes a new certificate from its directory without a restart: whoever connects next
gets it, open connections go on. The client side verifies with the system's roots (SSL_CERT_FILE and
SSL_CERT_DIR are honoured) unless told not to. TLS 1.2 is the least; HTTP/1.1 is the only protocol offered.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import Final

from sidecar.certificates import KeyPair, MountedAuthority, MountedCertificate, self_signed

log = logging.getLogger(__name__)

_ALPN: Final = ["http/1.1"]


def server_context(cert_path: Path | None, client_ca_file: Path | None = None) -> ssl.SSLContext:
    """For a port that is listened on: from a mounted directory, or self-signed where there is none.

    With `client_ca_file` only clients with a certificate of such an authority are served, over TLS 1.3
    and without resumption: a session of before would get past an authority that has changed.

    Raises:
        CertificateError: what is mounted cannot be used.
    """
    if cert_path is None:
        return _context(self_signed())
    mounted = MountedCertificate(cert_path)
    clients = None if client_ca_file is None else MountedAuthority(client_ca_file)
    outer = _context(mounted.pair, clients.current if clients else None)
    current = outer

    def choose(connection: ssl.SSLObject, _name: str | None, _context_: ssl.SSLContext) -> None:
        nonlocal current
        fresh = [source.changed() for source in (mounted, clients) if source is not None]
        if any(fresh):
            current = _context(mounted.pair, clients.current if clients else None)
        connection.context = current

    outer.sni_callback = choose  # asked for every handshake, named or not
    return outer


class ClientContexts:
    """Contexts of calls to engines or peers: made anew when the file of trusted roots has changed.

    A bundle that cannot be read leaves the last good one."""

    def __init__(self, *, verify: bool) -> None:
        self._verify = verify
        self._seen = _bundle_stamp()
        self._context = client_context(verify=verify)

    def __call__(self) -> ssl.SSLContext:
        """For a new connection; open ones go on."""
        seen = _bundle_stamp() if self._verify else self._seen
        if seen != self._seen:
            self._seen = seen
            fresh = client_context(verify=True)
            if seen is not None and fresh.cert_store_stats()["x509_ca"]:
                self._context = fresh
            else:  # OpenSSL says nothing of a file that it cannot read
                log.warning("no trusted roots in the changed file, the last good ones stay")
        return self._context


def _bundle_stamp() -> tuple[int, int, int] | None:
    """Changes with the file of trusted roots. Kubernetes swaps a symlink: `stat` sees the new inode."""
    paths = ssl.get_default_verify_paths()
    try:
        stat = os.stat(os.environ.get(paths.openssl_cafile_env) or paths.openssl_cafile)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def client_context(*, verify: bool) -> ssl.SSLContext:
    """For calls to engines or peers."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _context(pair: KeyPair, client_authority: str | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if client_authority is not None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=client_authority)
    context.set_alpn_protocols(_ALPN)
    # the library reads files only; this one has no name and never reaches a disk
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pair.certificate + b"\n" + pair.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    return context
