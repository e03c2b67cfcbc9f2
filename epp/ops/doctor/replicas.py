"""Pickers behind one name: every address that it has is one of them.

A Service balances over its replicas, so whoever asks it hears one of them and never knows which. A headless
Service's name has all their addresses, also of those that are not ready; to look them up takes no right at
the API server, which reading EndpointSlices would.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from epp.ops.asking import base_url


def replica_urls(url: str) -> list[str]:
    """The URL with each address of its host in the host's place; itself where the name has none.

    Raises:
        ConfigError: an unusable URL.
    """
    url = base_url(url, "--replicas-of")
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return [url]  # that nobody answers there will be said like any other picker's silence
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"{parts.scheme}://{f'[{h}]' if ':' in h else h}:{port}{parts.path}" for h in hosts]
