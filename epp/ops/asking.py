"""Asks running pickers over their metrics port. Bounded in time and size, one answer a picker.

The token goes to the URLs given and nowhere else: no proxy from the environment, no redirect is followed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from epp.core.errors import ConfigError
from sidecar.certificates import CERTIFICATE_FILE, KEY_FILE, CertificateError, load
from sidecar.tls import client_context

DEFAULT_URL: Final = "http://127.0.0.1:9090"
MAX_ANSWER_BYTES: Final = 8 << 20
# what reading an answer raises that is JSON, but not a picker's
STRANGE: Final = (LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one picker said: `body`, or that there is no such thing (404), or why it could not be asked."""

    url: str
    body: Any = None
    found: bool = False
    fault: str | None = None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def ask_all(arguments: argparse.Namespace, path: str) -> Iterator[Answer]:
    """GET `path` of every picker, one after the other.

    Raises:
        ConfigError: an unusable URL or token file.
    """
    token = read_token(arguments.token_file)
    urls = picker_urls(arguments.url)
    https = urllib.request.HTTPSHandler(context=tls_context(arguments))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect, https)
    for url in urls:
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
        yield _ask(opener, request, url, arguments.timeout)


def _ask(
    opener: urllib.request.OpenerDirector, request: urllib.request.Request, url: str, timeout_s: float
) -> Answer:
    try:
        with opener.open(request, timeout=timeout_s) as response:
            raw = response.read(MAX_ANSWER_BYTES + 1)
        if len(raw) > MAX_ANSWER_BYTES:
            return Answer(url, fault="the answer is too long")
        return Answer(url, json.loads(raw), found=True)
    except urllib.error.HTTPError as error:
        with error:
            return Answer(url, fault=None if error.code == 404 else _status(error.code))
    except http.client.RemoteDisconnected as error:
        hint = "; does it want a client certificate (--client-cert-dir)?" if url.startswith("https:") else ""
        return Answer(url, fault=f"{error}{hint}")
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", None) or error
        return Answer(url, fault=str(reason) or type(error).__name__)


def _status(code: int) -> str:
    if code == 401:
        return "401: the token is wrong, or the picker runs without --debug-token-file"
    return f"status {code}"


def tls_context(arguments: argparse.Namespace) -> ssl.SSLContext:
    """For pickers behind https: verified by the system's authorities and `--ca-file`; what is in
    `--client-cert-dir` is shown where a picker wants it.

    Raises:
        ConfigError: a file that cannot be used.
    """
    context = client_context(verify=True)
    authority: Path | None = arguments.ca_file
    directory: Path | None = arguments.client_cert_dir
    if authority is not None:
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise ConfigError(f"--ca-file {authority}: no PEM certificate") from error
        except OSError as error:
            raise ConfigError(f"--ca-file {authority}: {error.strerror}") from error
    if directory is not None:
        try:
            load(directory)
        except CertificateError as error:
            raise ConfigError(f"--client-cert-dir: {error}") from error
        context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    return context


def picker_urls(given: Sequence[str] | None) -> list[str]:
    """Every picker behind the `--url`s given. A name with several addresses is that of several replicas (a
    headless Service): each is one to ask. Raises ConfigError."""
    return [address for url in given or [DEFAULT_URL] for address in _each_address(base_url(url))]


def _each_address(url: str) -> list[str]:
    """`url` itself where its name has one address, or none, or a certificate to go by. Of two families one is
    taken: both lead to the same replicas."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        return [url]
    try:
        rows = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # asking will say so
        return [url]
    by_family = {family: sorted({str(row[4][0]) for row in rows if row[0] == family}) for family, *_ in rows}
    addresses = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []
    if len(addresses) < 2:
        return [url]
    port = f":{parts.port}" if parts.port else ""
    hosts = [f"[{address}]" if ":" in address else address for address in addresses]
    return [f"http://{host}{port}{parts.path}" for host in hosts]


def base_url(url: str, option: str = "--url") -> str:
    """Without a slash at its end. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{option} {url}: expected http://HOST:PORT")
    return url.rstrip("/")


def read_token(path: Path) -> str:
    """Raises ConfigError."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"--token-file {path}: holds no token")
    return token
