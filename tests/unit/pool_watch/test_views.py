"""What is kept of a pod and of a pool, and that nothing in them can hurt."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.pool_watch.views import InvalidPool, PoolSpec, view_pod, view_pool

JUNK: list[Any] = [None, 7, "x", [], {}, [None], {"a": None}, True, float("nan")]


def pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "a", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": status,
    }


def test_a_ready_pod() -> None:
    body = pod(podIP="10.0.0.1", conditions=[{"type": "Initialized"}, {"type": "Ready", "status": "True"}])
    body["metadata"] |= {
        "labels": {"llm-d.ai/role": "decode"},
        "annotations": {"llm-d.ai/active-ports": "8000, 8002"},
    }
    view = view_pod(body)
    assert (view.ip, view.ready, view.deleting) == ("10.0.0.1", True, False)
    assert dict(view.labels) == {"llm-d.ai/role": "decode"}
    assert view.active_ports == {8000, 8002}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_has_no_address(phase: str) -> None:
    assert view_pod(pod(podIP="10.0.0.1", phase=phase)).ip == ""


@pytest.mark.parametrize(
    ("text", "ip"),
    [
        ("2001:DB8:0::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", ""),
        ("0.0.0.0", ""),
        ("pod.local", ""),
    ],
)
def test_addresses_have_one_spelling_or_none(text: str, ip: str) -> None:
    assert view_pod(pod(podIP=text)).ip == ip


@pytest.mark.parametrize("text", ["", " ", "8000,", "all", "-1", "99999999999999999999"])
def test_active_ports_that_cannot_be_read_are_as_good_as_absent(text: str) -> None:
    body = pod()
    body["metadata"]["annotations"] = {"llm-d.ai/active-ports": text}
    assert view_pod(body).active_ports is None


@pytest.mark.parametrize("junk", JUNK)
def test_no_junk_makes_a_view_fail(junk: Any) -> None:
    for field in ("podIP", "phase", "conditions"):
        assert view_pod(pod(**{field: junk})).ready is False
    for body in ({"metadata": junk, "status": junk}, {"metadata": {"labels": junk, "annotations": junk}}):
        assert view_pod(body).ip == ""
    for spec in (junk, {"selector": junk, "targetPorts": junk}, {"selector": {"matchLabels": junk}}):
        assert isinstance(view_pool({"spec": spec}), InvalidPool)


def pool(ports: Any, labels: Any = None) -> PoolSpec | InvalidPool:
    return view_pool(
        {"spec": {"selector": {"matchLabels": labels or {"b": "2", "a": "1"}}, "targetPorts": ports}}
    )


def test_a_pool() -> None:
    spec = pool([{"number": 8000}, {"number": 8001}])
    assert isinstance(spec, PoolSpec)
    assert spec.target_ports == (8000, 8001)
    assert spec.label_selector == "a=1,b=2"


@pytest.mark.parametrize(
    ("ports", "told"),
    [
        ([], "0 entries"),
        ([{"number": 8000 + n} for n in range(9)], "9 entries"),
        ([{"number": 8000}, {"number": 8000}], "twice"),
        ([{"number": 0}], "1..65535"),
        ([{"number": True}], "1..65535"),
        ([{"number": "8000"}], "1..65535"),
    ],
)
def test_pools_that_cannot_be_used_say_why(ports: Any, told: str) -> None:
    found = pool(ports)
    assert isinstance(found, InvalidPool)
    assert told in found.reason


def test_a_pool_that_would_select_everything_is_refused() -> None:
    found = view_pool({"spec": {"selector": {}, "targetPorts": [{"number": 8000}]}})
    assert isinstance(found, InvalidPool)
    assert "every pod" in found.reason
