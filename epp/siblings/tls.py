"""Mutual TLS between replicas: one directory with `tls.crt`, `tls.key` and `ca.crt`.

Whoever holds a certificate of that authority is a sibling: it is given the index seed, and its claims
about what engines hold are believed as far as the engines do not contradict them. So the authority
should sign replicas of the picker and nothing else. There is no fall-back to anything weaker.
Files that change are read again at the next connection; bad ones are reported and the last good kept.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Final

from epp.core.errors import ConfigError

log = logging.getLogger(__name__)

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
AUTHORITY_FILE: Final = "ca.crt"

_Signature = tuple[tuple[int, int, int], ...]


class MutualTls:
    """Contexts for both directions from the files as they are now."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError, naming the directory, where the files cannot be used."""
        self._directory = directory
        self._seen = self._signature()
        try:
            self._server, self._client = self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{directory}: {_sentence(error)}") from error

    def server_context(self) -> ssl.SSLContext:
        self._refresh()
        return self._server

    def client_context(self) -> ssl.SSLContext:
        self._refresh()
        return self._client

    def _refresh(self) -> None:
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._server, self._client = self._load()
        except (OSError, ssl.SSLError) as error:
            log.warning("%s not reloaded, the last good stays: %s", self._directory, _sentence(error))
        else:
            log.info("certificates reloaded from %s", self._directory)

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the name, too
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._directory / AUTHORITY_FILE)
            context.load_cert_chain(
                self._directory / CERTIFICATE_FILE, self._directory / KEY_FILE, password=_no_password
            )
        return server, client

    def _signature(self) -> _Signature:
        """Changes with any file. Kubernetes swaps a symlink: `stat` sees the new inode."""
        found: list[tuple[int, int, int]] = []
        for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE):
            try:
                stat = (self._directory / name).stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)


def _no_password() -> str:
    """Else OpenSSL would ask the terminal for one."""
    return ""


def _sentence(error: OSError) -> str:
    needed = f"{CERTIFICATE_FILE}, {KEY_FILE} (without password) and {AUTHORITY_FILE} are needed"
    what = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return f"{what or type(error).__name__}; {needed}"
