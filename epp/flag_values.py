"""What the picker's flags may be: from a text to a value, or an error that says what is expected."""

from __future__ import annotations

import argparse
import re

from sidecar.wire import DESTINATION, REQUEST_ID, ROUTING_HEADERS

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,316}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,128}")  # RFC 9110, token
# removed before an engine sees them, or needed by it
_NO_SALT_HEADERS = {"host", "content-type", "content-encoding", "content-length", "transfer-encoding"}


def port(text: str) -> int:
    """A TCP port, 0 for any free one. Without this check 99999 would silently be 34463."""
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port, 0 to 65535")
    return int(text)


def ports(text: str) -> list[int]:
    """TCP ports, comma separated: the index is the rank."""
    found = [port(part.strip()) for part in text.split(",")]
    if 0 in found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected ports, 1 to 65535")
    return found


def labels(text: str) -> dict[str, str]:
    """`name=value,...`: the equality terms of a label selector."""
    terms = [part.partition("=") for part in text.split(",")]
    found = {name.strip(): value.strip() for name, equals, value in terms if equals}
    if len(found) != len(terms) or not all(map(_LABEL.fullmatch, (*found, *found.values()))):
        raise argparse.ArgumentTypeError(f"{text!r}: expected labels such as app=llama,tier=gpu")
    return found


def body_bytes(text: str) -> int:
    """A body limit: 1 byte to 1 GiB."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 to {1 << 30} bytes")
    return int(text)


def snapshot_bytes(text: str) -> int:
    """A limit of what a snapshot may have: 1 MiB to 64 GiB."""
    if not text.isascii() or not text.isdigit() or not 1 << 20 <= int(text[:12]) <= 64 << 30:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {1 << 20} to {64 << 30} bytes")
    return int(text)


def index_bytes(text: str) -> int:
    """A limit of what the prefix index may take: 1 MiB to 1 TiB."""
    if not text.isascii() or not text.isdigit() or not 1 << 20 <= int(text[:14]) <= 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {1 << 20} to {1 << 40} bytes")
    return int(text)


def host_port(text: str) -> tuple[str, int]:
    """`host:port`, an IPv6 host in brackets."""
    host, colon, number = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not set(host).isdisjoint(" /@") or port(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected host:port")
    return host, port(number)


def file_bytes(text: str) -> int:
    """A file's size limit: 4 KiB to 1 TiB."""
    if not text.isascii() or not text.isdigit() or not 4096 <= int(text[:14]) <= 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 4096 to {1 << 40} bytes")
    return int(text)


def file_count(text: str) -> int:
    """How many files: 1 to 1000."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:5]) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 to 1000")
    return int(text)


def lease_name(text: str) -> str:
    """A name of a Lease, with room for a pod's behind it."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a Lease (a-z, 0-9, -, at most 63)")
    return text


def salt_header(text: str) -> str:
    """The name of a request header that is nobody else's, in lower case."""
    name = text.lower()
    taken = name in _NO_SALT_HEADERS or name in (*ROUTING_HEADERS, DESTINATION, REQUEST_ID)
    if taken or not _HEADER_NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r}: expected the name of a header such as x-tenant-id")
    return name


def boolean(text: str) -> bool:
    """true or false, as Go flags are written (case S-G07: false must mean false)."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected true or false")
    return text.lower() == "true"
