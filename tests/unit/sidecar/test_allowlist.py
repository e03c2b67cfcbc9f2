"""The allow-list: by host and port, fed from the file, the last good rows kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_plugin.identity import EndpointId
from sidecar.allowlist import AllowList, EndpointFileWatch
from sidecar.endpoint import HostPort
from sidecar.endpoint_file import EndpointFileError, EndpointRow
from sidecar.telemetry import Telemetry

_A = "endpoints:\n  - {pod: a, host: 127.0.1.1, serving_port: 8000, p2p_port: 7801}\n"
_B = "endpoints:\n  - {pod: b, host: 127.0.1.2, serving_port: 8000}\n"


class _Watched:
    def __init__(self, path: Path) -> None:
        self.allow_list = AllowList()
        self.telemetry = Telemetry()
        self.watch = EndpointFileWatch(path, self.allow_list, self.telemetry, p2p_base_port=7777)

    def knows(self, text: str) -> bool:
        return self.allow_list.find(HostPort.parse(text)) is not None

    @property
    def errors(self) -> float:
        return self.telemetry.value("kvpull_sidecar_endpoint_file_errors_total")


def _write(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(_A)
    return path


def test_an_address_is_allowed_with_its_port_only(pool: Path) -> None:
    watched = _Watched(pool)
    watched.watch.load_first()
    assert watched.knows("127.0.1.1:8000")
    assert watched.knows("[::ffff:127.0.1.1]:8000")
    assert not watched.knows("127.0.1.1:22")
    assert not watched.knows("127.0.1.2:8000")
    row = watched.allow_list.find(HostPort.parse("127.0.1.1:8000"))
    assert row is not None
    assert row.p2p_port == 7801


def test_hosts_of_members_are_recognised_in_every_spelling(pool: Path) -> None:
    watched = _Watched(pool)
    watched.watch.load_first()
    assert watched.allow_list.has_host("127.0.1.1")
    assert watched.allow_list.has_host("::ffff:127.0.1.1")
    assert not any(watched.allow_list.has_host(host) for host in ("127.0.0.1", None, "", "fe80::1%lo"))


def test_a_bad_file_at_start_is_fatal(tmp_path: Path) -> None:
    with pytest.raises(EndpointFileError, match=r"absent\.yaml"):
        _Watched(tmp_path / "absent.yaml").watch.load_first()


async def test_a_changed_file_is_taken_and_an_unchanged_one_not_read(pool: Path) -> None:
    watched = _Watched(pool)
    watched.watch.load_first()
    assert not await watched.watch.refresh()
    _write(pool, _B + "# longer\n")
    assert await watched.watch.refresh()
    assert watched.knows("127.0.1.2:8000")
    assert not watched.knows("127.0.1.1:8000")


async def test_a_link_swap_is_seen(tmp_path: Path) -> None:
    for name, text in (("v1", _A), ("v2", _B)):
        (tmp_path / name).write_text(text)
    link = tmp_path / "pool.yaml"
    link.symlink_to("v1")
    watched = _Watched(link)
    watched.watch.load_first()
    (tmp_path / "next").symlink_to("v2")
    os.replace(tmp_path / "next", link)
    assert await watched.watch.refresh()
    assert watched.knows("127.0.1.2:8000")


@pytest.mark.parametrize("bad", ["", "endpoints: [", _A + "  - {pod: a}\n", None])
async def test_after_a_bad_write_the_last_good_rows_stay(pool: Path, bad: str | None) -> None:
    watched = _Watched(pool)
    watched.watch.load_first()
    _write(pool, bad)
    assert not await watched.watch.refresh()
    assert watched.knows("127.0.1.1:8000")
    assert watched.errors == 1
    assert not await watched.watch.refresh()
    assert watched.errors == 1, "one fault is counted once"
    _write(pool, _B)
    assert await watched.watch.refresh()
    assert watched.knows("127.0.1.2:8000")


def _row(pod: str, host: str, port: int = 8000) -> EndpointRow:
    return EndpointRow(pod, 0, host, port, port, 5557, 5657, 7777)


def test_members_come_and_go_one_by_one() -> None:
    members = AllowList()
    members.put(_row("a", "10.0.0.1"))
    members.put(_row("b", "10.0.0.1", 8001))
    members.put(_row("a", "10.0.0.2"))  # it has moved
    assert members.find(HostPort.parse("10.0.0.1:8000")) is None
    assert members.find(HostPort.parse("10.0.0.2:8000")) is not None
    assert members.has_host("10.0.0.1")  # b is there
    members.remove(EndpointId("b", 0))
    members.remove(EndpointId("b", 0))
    assert not members.has_host("10.0.0.1")
    members.remove(EndpointId("a", 0))
    assert len(members) == 0
    assert not members.has_host("10.0.0.2")


def test_an_address_that_passed_on_stays_the_others() -> None:
    members = AllowList()
    members.put(_row("old", "10.0.0.1"))
    members.put(_row("new", "10.0.0.1"))
    members.remove(EndpointId("old", 0))
    found = members.find(HostPort.parse("10.0.0.1:8000"))
    assert found is not None
    assert found.pod == "new"
    assert members.has_host("10.0.0.1")
