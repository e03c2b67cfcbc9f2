"""Identity comparison, without a connection."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from engine_plugin import wire
from engine_plugin.identity import COMPARED_FIELDS, PeerIdentity, format_address
from engine_plugin.transport.control.channel import speaks_from
from engine_plugin.transport.control.handshake import Refusal

WHO = PeerIdentity("a", 0, "m", "r", 16, 4096, "bf16", "hnd", 1, "sha256", "seed-fingerprint")
PEER = replace(WHO, instance="b", rank=3)


def test_every_field_is_compared_but_who_and_rank() -> None:
    assert set(COMPARED_FIELDS) == {field.name for field in fields(PeerIdentity)} - {"instance", "rank"}
    assert WHO.mismatch(PEER) is None


@pytest.mark.parametrize("name", COMPARED_FIELDS)
def test_a_differing_field_is_named(name: str) -> None:
    value = getattr(PEER, name)
    changed: Any = value + 1 if isinstance(value, int) else value + "x"
    other = replace(PEER, **{name: changed})
    assert WHO.mismatch(other) == other.mismatch(WHO) == name


def test_ones_own_instance_is_not_a_peer() -> None:
    assert WHO.mismatch(WHO) == "instance"


def test_info_labels_are_those_of_the_wire() -> None:
    labels = WHO.info_labels(p2p_addr=("127.0.0.1", 7777), events_port=5557, replay_port=5657)
    assert tuple(labels) == wire.ENGINE_INFO_LABELS
    assert (labels["p2p_addr"], labels["protocol"]) == ("127.0.0.1:7777", str(wire.P2P_PROTOCOL_VERSION))
    assert (
        labels["model_fp"]
        != replace(WHO, revision="r2").info_labels(p2p_addr=("h", 1), events_port=1, replay_port=1)[
            "model_fp"
        ]
    )


def test_ipv6_addresses_have_brackets() -> None:
    assert format_address(("fd00::1", 7777)) == "[fd00::1]:7777"


@pytest.mark.parametrize(
    ("local", "remote", "bound"),
    [
        ("127.0.0.2", "127.0.0.3", True),
        ("10.0.0.1", "10.0.0.2", True),
        ("fd00::1", "fd00::2", True),
        ("0.0.0.0", "10.0.0.2", False),
        ("127.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("10.0.0.1", "fd00::2", False),
        ("fe80::1", "fe80::2%eth0", False),
        ("engine-0", "10.0.0.2", False),
        ("", "10.0.0.2", False),
    ],
)
def test_sessions_come_from_the_address_we_listen_on(local: str, remote: str, bound: bool) -> None:
    assert speaks_from(local, remote) is bound


def test_labels_are_bounded_whatever_the_peer_says() -> None:
    assert Refusal("identity", "dtype").label == "dtype"
    assert Refusal("identity", "x" * 200).label == "identity"
    assert Refusal("limit", "anything").label == "limit"
