"""The address plan: one place derives every port; bad plans are refused with what is allowed."""

from __future__ import annotations

import pytest

from deploy.local.ports import AddressError, AddressPlan


def test_default_plan_is_the_documented_one() -> None:
    plan = AddressPlan()
    engine = plan.engine(2, "engine-b")
    assert engine.serving == "127.0.1.2:8000"
    assert (engine.engine_port, engine.events_port, engine.replay_port, engine.p2p_port) == (
        8200,
        5557,
        5657,
        7777,
    )
    control = plan.control
    assert (control.gateway_port, control.admin_port) == (8080, 9901)
    assert (control.extproc_port, control.health_port, control.metrics_port) == (9002, 9003, 9090)


def test_two_plans_share_no_listener() -> None:
    def listeners(plan: AddressPlan) -> set[tuple[str, int]]:
        engines = [plan.engine(n, f"engine-{n}") for n in range(1, 5)]
        rows = [*plan.control.listeners(), *(row for engine in engines for row in engine.listeners())]
        found = {(host, port) for _, host, port in rows}
        assert len(found) == len(rows)
        return found

    assert not listeners(AddressPlan()) & listeners(AddressPlan("127.0.9", 1000))


@pytest.mark.parametrize("block", ["10.0.0", "127.0", "127.0.0.1", "127.0.x", ""])
def test_block_outside_loopback_is_refused(block: str) -> None:
    with pytest.raises(AddressError, match=r"address block"):
        AddressPlan(block)


@pytest.mark.parametrize("offset", [-1, 60_000])
def test_offset_out_of_range_is_refused(offset: int) -> None:
    with pytest.raises(AddressError, match=r"0\.\.50000"):
        AddressPlan(port_offset=offset)
