"""What is kept of a pod and of a pool, and that nothing in them can hurt."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.endpoint import EndpointError, canonical_host
from sidecar.pool_watch.views import InvalidPool, PodView, PoolSpec, view_pod, view_pool

JUNK: list[Any] = [None, 7, "x", [], {}, [None], {"a": None}, True]


def pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "a", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": status,
    }


def seen(body: dict[str, Any]) -> PodView:
    return view_pod(orjson.dumps(body))


def test_a_ready_pod() -> None:
    body = pod(podIP="10.0.0.1", conditions=[{"type": "Initialized"}, {"type": "Ready", "status": "True"}])
    body["metadata"] |= {
        "labels": {"llm-d.ai/role": "decode"},
        "annotations": {"llm-d.ai/active-ports": "8000, 8002"},
    }
    view = seen(body)
    assert (view.ip, view.ready, view.deleting) == ("10.0.0.1", True, False)
    assert dict(view.labels) == {"llm-d.ai/role": "decode"}
    assert view.active_ports == {8000, 8002}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_has_no_address(phase: str) -> None:
    assert seen(pod(podIP="10.0.0.1", phase=phase)).ip == ""


@pytest.mark.parametrize(
    ("text", "ip"),
    [
        ("2001:DB8:0::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", ""),
        ("0.0.0.0", ""),
        ("224.0.0.1", ""),
        ("239.255.255.255", ""),
        ("223.255.255.255", "223.255.255.255"),
        ("1.0.0.0", "1.0.0.0"),
        ("10.0.0.256", ""),
        ("10.0.0.01", ""),
        ("10.0.0.1\n", ""),
        ("pod.local", ""),
    ],
)
def test_addresses_have_one_spelling_or_none(text: str, ip: str) -> None:
    assert seen(pod(podIP=text)).ip == ip


@given(st.integers(0, 2**32 - 1))
def test_the_quick_way_for_ipv4_says_what_the_general_one_says(number: int) -> None:
    text = str(ipaddress.IPv4Address(number))
    try:
        expected = canonical_host(text)
    except EndpointError:
        expected = ""
    assert seen(pod(podIP=text)).ip == expected


@pytest.mark.parametrize("text", ["", " ", "8000,", "all", "-1", "99999999999999999999"])
def test_active_ports_that_cannot_be_read_are_as_good_as_absent(text: str) -> None:
    body = pod()
    body["metadata"]["annotations"] = {"llm-d.ai/active-ports": text}
    assert seen(body).active_ports is None


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_unreadable_or_harmless(junk: Any) -> None:
    """A wrong type is refused as such, and whatever passes is an endpoint of nothing."""
    bodies = [{"metadata": junk, "status": junk}, {"metadata": {"labels": junk, "annotations": junk}}]
    bodies += [pod(**{field: junk}) for field in ("podIP", "phase", "conditions")]
    for body in bodies:
        with contextlib.suppress(msgspec.ValidationError):
            view = seen(body)
            assert (view.ip, view.ready) == ("", False)
    for spec in (junk, {"selector": junk, "targetPorts": junk}, {"selector": {"matchLabels": junk}}):
        with contextlib.suppress(msgspec.ValidationError):
            assert isinstance(view_pool(orjson.dumps({"spec": spec})), InvalidPool)


def pool(ports: Any) -> PoolSpec | InvalidPool:
    spec = {"selector": {"matchLabels": {"b": "2", "a": "1"}}, "targetPorts": ports}
    return view_pool(orjson.dumps({"spec": spec}))


def test_a_pool() -> None:
    spec = pool([{"number": 8000}, {"number": 8001}])
    assert isinstance(spec, PoolSpec)
    assert spec.target_ports == (8000, 8001)
    assert spec.label_selector == "a=1,b=2"


@pytest.mark.parametrize("number", [True, "8000", None, 1.5])
def test_a_port_of_a_wrong_type_is_unreadable(number: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        pool([{"number": number}])


@pytest.mark.parametrize(
    ("ports", "told"),
    [
        ([], "0 entries"),
        ([{"number": 8000 + n} for n in range(9)], "9 entries"),
        ([{"number": 8000}, {"number": 8000}], "twice"),
        ([{"number": 0}], "1..65535"),
        ([{"number": 65536}], "1..65535"),
    ],
)
def test_pools_that_cannot_be_used_say_why(ports: Any, told: str) -> None:
    found = pool(ports)
    assert isinstance(found, InvalidPool)
    assert told in found.reason


def test_a_pool_that_would_select_everything_is_refused() -> None:
    found = view_pool(b'{"spec":{"selector":{},"targetPorts":[{"number":8000}]}}')
    assert isinstance(found, InvalidPool)
    assert "every pod" in found.reason
