"""A session stays on its endpoint, by a header that the client carries or by a table that we keep."""

from __future__ import annotations

import base64

import pytest

from epp.plugins import session_affinity
from epp.plugins.plugin_type import HeaderSource
from epp.plugins.session_affinity import EncodedEndpoint, SessionAffinity, SessionTable
from tests.unit.core.rows import candidate
from tests.unit.plugins.pools import asked, pods

ROWS = [candidate("a"), candidate("b")]


def table(ttl_s: float = 300.0, *sources: HeaderSource) -> SessionTable:
    return SessionTable(sources or (HeaderSource("x-session-id"),), ttl_s)


def test_the_answer_names_the_endpoint_and_the_next_request_goes_there() -> None:
    plugin = SessionAffinity("s", EncodedEndpoint("x-session-token"))
    assert plugin.header_names == {"x-session-token"}
    assert pods(plugin.filter(asked(), ROWS)) == ["a", "b"]
    headers = plugin.placed(asked(), ROWS, {"decode": ROWS[1], "prefill": ROWS[0]})
    assert base64.b64decode(headers["x-session-token"]).decode() == str(ROWS[1].endpoint.id)
    back = asked(headers=headers)
    assert pods(plugin.filter(back, ROWS)) == ["b"]
    assert list(plugin.score(back, ROWS)) == [0.0, 1.0]


def test_a_named_profile_is_bound_instead_of_the_primary_one() -> None:
    plugin = SessionAffinity("s", EncodedEndpoint("h"), "prefill")
    headers = plugin.placed(asked(), ROWS, {"decode": ROWS[1], "prefill": ROWS[0]})
    assert pods(plugin.filter(asked(headers=headers), ROWS)) == ["a"]


@pytest.mark.parametrize("value", ["", "!!", "/w==", base64.b64encode(b"gone").decode(), "a" * 9_999])
def test_what_names_nobody_binds_to_nobody(value: str) -> None:
    plugin = SessionAffinity("s", EncodedEndpoint("h"))
    assert pods(plugin.filter(asked(headers={"h": value}), ROWS)) == ["a", "b"]
    assert list(plugin.score(asked(headers={"h": value}), ROWS)) == [0.0, 0.0]


def test_a_session_id_is_remembered_until_its_time_is_over() -> None:
    sessions = table(300.0)
    plugin = SessionAffinity("s", sessions)
    headers = {"x-session-id": "one"}
    assert plugin.placed(asked(headers=headers), ROWS, {"default": ROWS[1]}) == {}
    assert pods(plugin.filter(asked(headers=headers, now_s=299.9), ROWS)) == ["b"]
    assert pods(plugin.filter(asked(headers={"x-session-id": "two"}), ROWS)) == ["a", "b"]
    assert pods(plugin.filter(asked(headers=headers, now_s=300.0), ROWS)) == ["a", "b"]
    plugin.placed(asked(now_s=300.0), ROWS, {"default": ROWS[0]})  # without a session: only sweeps
    assert len(sessions) == 0


def test_a_request_renews_its_session() -> None:
    plugin = SessionAffinity("s", table(300.0))
    headers = {"x-session-id": "one"}
    for now_s in (0.0, 200.0, 400.0):
        plugin.placed(asked(headers=headers, now_s=now_s), ROWS, {"default": ROWS[0]})
    assert pods(plugin.filter(asked(headers=headers, now_s=600.0), ROWS)) == ["a"]


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_affinity, "MAX_SESSIONS", 3)
    sessions = table()
    plugin = SessionAffinity("s", sessions)
    for n in range(10):
        plugin.placed(asked(headers={"x-session-id": str(n)}), ROWS, {"default": ROWS[0]})
    assert len(sessions) == 3
    assert pods(plugin.filter(asked(headers={"x-session-id": "9"}), ROWS)) == ["a"]


def test_the_first_source_that_says_something_counts() -> None:
    sources = (HeaderSource("x-one"), HeaderSource("cookie", "sid"))
    plugin = SessionAffinity("s", table(300.0, *sources))
    assert plugin.header_names == {"x-one", "cookie"}
    plugin.placed(asked(headers={"cookie": "a=b; sid=7"}), ROWS, {"default": ROWS[1]})
    assert pods(plugin.filter(asked(headers={"x-one": "", "cookie": "sid=7; c=d"}), ROWS)) == ["b"]
    assert pods(plugin.filter(asked(headers={"x-one": "8", "cookie": "sid=7"}), ROWS)) == ["a", "b"]
    assert pods(plugin.filter(asked(headers={"cookie": "xsid=7"}), ROWS)) == ["a", "b"]


def test_headers_do_not_show_in_a_request() -> None:
    assert "secret" not in repr(asked(headers={"x-session-id": "secret"}))
