"""`ip:port` as a value: the one place that reads and writes addresses of routing headers.

Two texts of one address (an IPv4-mapped IPv6 form, other letter case, leading zeros in an IPv6
group) must compare equal, otherwise an allow-list can be walked around and a pull from oneself is
not recognised. Names are refused: a header must never cause a DNS look-up. No I/O here.
"""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import dataclass

MAX_PORT = 65535
_MAX_TEXT_CHARS = 64  # "[" + 45 characters of IPv6 + "]:65535" and some room


class EndpointError(ValueError):
    """A text that is not `ip:port` (or an address that no endpoint can have)."""


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """A canonical IP address and a TCP port. Build it with `parse` or `of`, never by hand."""

    host: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> HostPort:
        """The value for an address without brackets and a port.

        Raises:
            EndpointError: not an IP address, or not a port.
        """
        if not 1 <= port <= MAX_PORT:
            raise EndpointError(f"port {port} is not in 1..{MAX_PORT}")
        return cls(canonical_host(host), port)

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """The value of `1.2.3.4:80` or `[2001:db8::1]:80`; surrounding blanks are ignored.

        Raises:
            EndpointError: anything else: no port, a bare IPv6 address, a name, a zone id.
        """
        text = text.strip()
        if len(text) > _MAX_TEXT_CHARS:
            raise EndpointError(f"an address of {len(text)} characters")
        host, colon, port = text.rpartition(":")
        if not colon:
            raise EndpointError(f"{text!r} has no port")
        if not (port.isascii() and port.isdigit() and len(port) <= 5):
            raise EndpointError(f"{text!r} has no decimal port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            if ":" not in host:
                raise EndpointError(f"{text!r} has brackets around something that is not IPv6")
        elif ":" in host:
            raise EndpointError(f"{text!r} is IPv6 without brackets")
        return cls.of(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@functools.lru_cache(4096)
def canonical_host(text: str) -> str:
    """The one spelling of an IP address; IPv4-mapped IPv6 becomes IPv4.

    Raises:
        EndpointError: not an IP address, with a zone id, or unspecified or multicast.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise EndpointError(f"{text!r} is not an IP address") from None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise EndpointError(f"{text!r} has a zone id, which means something on one host only")
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
    if address.is_unspecified or address.is_multicast:
        raise EndpointError(f"{text!r} is not the address of one host")
    return address.compressed
