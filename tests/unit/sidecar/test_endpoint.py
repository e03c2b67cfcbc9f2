"""`ip:port` values: one spelling for one address, and nothing that is not an address."""

from __future__ import annotations

import contextlib
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.endpoint import EndpointError, HostPort


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("  10.0.0.1:8000 ", "10.0.0.1:8000"),
        ("[2001:DB8:0:0::0001]:80", "[2001:db8::1]:80"),
        ("[::ffff:10.0.0.1]:8000", "10.0.0.1:8000"),
        ("[::FFFF:0a00:0001]:8000", "10.0.0.1:8000"),
        ("10.0.0.1:08000", "10.0.0.1:8000"),
        ("[::1]:65535", "[::1]:65535"),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    assert str(HostPort.parse(text)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1",
        "10.0.0.1:",
        ":8000",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:-1",
        "10.0.0.1:+80",
        "10.0.0.1:8_0",
        "10.0.0.1:٨٠",
        "010.0.0.1:80",
        "10.1:80",
        "0x0a000001:80",
        "localhost:80",
        "metadata.internal:80",
        "2001:db8::1:80",
        "[10.0.0.1]:80",
        "[fe80::1%eth0]:80",
        "[2001:db8::1]",
        "0.0.0.0:80",
        "[::]:80",
        "224.0.0.1:80",
        "10.0.0.1:80,10.0.0.2:80",
        "user@10.0.0.1:80",
        "10.0.0.1:80/x",
        "1" * 500 + ":80",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(EndpointError):
        HostPort.parse(text)


@given(st.ip_addresses(), st.integers(1, 65535))
def test_formatted_text_parses_to_the_same_value(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    try:
        value = HostPort.of(str(address), port)
    except EndpointError:
        assert (
            address.is_unspecified or address.is_multicast or "%" in str(address) or _maps_to_group(address)
        )
        return
    assert HostPort.parse(str(value)) == value


@given(st.text())
def test_no_text_raises_anything_else(text: str) -> None:
    with contextlib.suppress(EndpointError):
        assert HostPort.parse(str(HostPort.parse(text))) == HostPort.parse(text)


def _maps_to_group(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped is not None and (mapped.is_multicast or mapped.is_unspecified)
