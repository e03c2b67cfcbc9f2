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
    assert f"Port {port} on 127.0.31.2" in sentence
    assert "gateway" in sentence
    assert "--port-offset" in sentence
    assert list(preflight.check_listeners([("gateway", "127.0.31.2", port)])) == []


def test_address_that_is_not_local_is_reported_once() -> None:
    foreign = "192.0.2.1"  # reserved for documentation: no machine has it
    error = preflight.bind_error(foreign, 8000)
    assert error is not None
    assert error.errno == errno.EADDRNOTAVAIL
    sentences = list(preflight.check_listeners([("engine-a", foreign, 8000), ("events", foreign, 8001)]))
    assert len(sentences) == 1
    assert foreign in sentences[0]
    assert "--address-block" in sentences[0]
