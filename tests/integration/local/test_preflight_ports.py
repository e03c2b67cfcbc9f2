"""Ports and addresses as the real kernel sees them."""

from __future__ import annotations

import errno
import socket

from deploy.local import preflight


def test_taken_port_is_named_with_its_part_and_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.31.2", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        (sentence,) = preflight.check_listeners([("gateway", "127.0.31.2", port)])
    assert f"port {port} on 127.0.31.2 (needed for the gateway)" in sentence
    assert "--port-offset" in sentence
    assert list(preflight.check_listeners([("gateway", "127.0.31.2", port)])) == []


def test_many_taken_ports_are_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.31.2", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        (sentence,) = preflight.check_listeners([(f"part {n}", "127.0.31.2", port) for n in range(9)])
    assert "part 0" in sentence
    assert "part 8" not in sentence
    assert "and 6 more" in sentence


def test_address_that_is_not_local_is_reported_once() -> None:
    foreign = "192.0.2.1"  # reserved for documentation: no machine has it
    error = preflight.bind_error(foreign, 8000)
    assert error is not None
    assert error.errno == errno.EADDRNOTAVAIL
    (sentence,) = preflight.check_listeners([("engine-a", foreign, 8000), ("events", foreign, 8001)])
    assert sentence.count(foreign) == 1
    assert "--address-block" in sentence
