"""The static endpoint file on a real file system: edits, link swaps, half-written and bad files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from watchfiles._rust_notify import WatchfilesRustInternalError

from engine_plugin.identity import EndpointId
from epp.endpoints.file_source import CHECK_INTERVAL_S, FileSource, endpoint_of, scrape_target_of
from epp.endpoints.scraper import MetricsPageSettings
from sidecar.endpoint_file import EndpointRow

from .conftest import BOUND_S, Collector, running

Change = tuple[str, str]


def text_of(*pods: str, port: int = 8000) -> str:
    rows = [
        f"  - {{pod: {pod}, rank: 0, host: 127.0.1.{i + 1}, serving_port: {port}, metrics_port: 8200}}\n"
        for i, pod in enumerate(pods)
    ]
    return "endpoints:\n" + "".join(rows)


class Followed:
    """A `FileSource` with its changes in order."""

    def __init__(self, path: Path) -> None:
        self.changes: Collector[Change] = Collector()
        self.errors: Collector[str] = Collector()
        self.source = FileSource(
            path, on_upsert=self._upsert, on_remove=self._remove, on_error=self.errors.add
        )

    def _upsert(self, row: EndpointRow) -> None:
        self.changes.add(("upsert", f"{row.pod}:{row.serving_port}"))

    def _remove(self, endpoint_id: EndpointId) -> None:
        self.changes.add(("remove", endpoint_id.pod))


@pytest.fixture
async def followed(tmp_path: Path) -> AsyncIterator[Followed]:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text_of("a", "b"))
    followed = Followed(path)
    async with running(followed.source.run()):
        await asyncio.wait_for(followed.source.loaded.wait(), BOUND_S)
        yield followed


async def test_first_load_and_row_types(followed: Followed) -> None:
    assert followed.changes.items == [("upsert", "a:8000"), ("upsert", "b:8000")]
    row = followed.source.rows[1]
    assert endpoint_of(row).address == "127.0.1.2:8000"
    assert endpoint_of(row).id == EndpointId("b", 0)
    assert scrape_target_of(row, MetricsPageSettings()).url == "http://127.0.1.2:8200/metrics"


async def test_an_edit_tells_only_what_changed(followed: Followed, tmp_path: Path) -> None:
    seen = len(followed.changes.items)
    (tmp_path / "endpoints.yaml").write_text(text_of("a", "c"))
    items = await followed.changes.until(lambda items: len(items) >= seen + 2)
    assert items[seen:] == [("remove", "b"), ("upsert", "c:8000")]


async def test_a_changed_row_is_told_again(followed: Followed, tmp_path: Path) -> None:
    seen = len(followed.changes.items)
    (tmp_path / "endpoints.yaml").write_text(text_of("a", "b", port=9000))
    items = await followed.changes.until(lambda items: len(items) >= seen + 2)
    assert items[seen:] == [("upsert", "a:9000"), ("upsert", "b:9000")]


async def test_replaced_by_rename(followed: Followed, tmp_path: Path) -> None:
    seen = len(followed.changes.items)
    (tmp_path / "new").write_text(text_of("a"))
    os.replace(tmp_path / "new", tmp_path / "endpoints.yaml")
    items = await followed.changes.until(lambda items: len(items) > seen)
    assert items[seen:] == [("remove", "b")]


async def test_the_data_link_of_a_mounted_configmap_is_swapped(tmp_path: Path) -> None:
    """S-G05: endpoints.yaml -> ..data/endpoints.yaml, ..data -> ..version; only ..data is replaced."""
    for version, pods in (("..1", ("a", "b")), ("..2", ("b", "c"))):
        (tmp_path / version).mkdir()
        (tmp_path / version / "endpoints.yaml").write_text(text_of(*pods))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "endpoints.yaml").symlink_to("..data/endpoints.yaml")
    followed = Followed(tmp_path / "endpoints.yaml")
    async with running(followed.source.run()):
        await followed.changes.until(lambda items: len(items) >= 2)
        (tmp_path / "..data_tmp").symlink_to("..2")
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
        await followed.changes.until(lambda items: ("upsert", "c:8000") in items)
    assert {row.pod for row in followed.source.rows} == {"b", "c"}
    assert ("remove", "a") in followed.changes.items


async def test_a_link_into_another_directory_is_followed(tmp_path: Path) -> None:
    """No event comes from the watched directory: the comparison of the status sees it."""
    elsewhere, watched = tmp_path / "elsewhere", tmp_path / "watched"
    elsewhere.mkdir()
    watched.mkdir()
    (elsewhere / "real.yaml").write_text(text_of("a"))
    (watched / "endpoints.yaml").symlink_to(elsewhere / "real.yaml")
    followed = Followed(watched / "endpoints.yaml")
    async with running(followed.source.run()):
        await followed.changes.until(lambda items: len(items) >= 1)
        (elsewhere / "real.yaml").write_text(text_of("a", "b"))
        await followed.changes.until(lambda items: ("upsert", "b:8000") in items)


HALF = text_of("x", "y", "z")[: len(text_of("x", "y")) + 12]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (HALF, "endpoints.yaml"),
        ("", "endpoints.yaml"),
        ("endpoints: [{pod: a}]", r"endpoints[0]"),
        (
            text_of("a", "b").replace("serving_port: 8000", "serving_port: 99999"),
            "endpoints[0]: serving_port",
        ),
        (text_of("a", "a"), "endpoints[1]"),
        ("\x00\x01", "endpoints.yaml"),
    ],
)
async def test_a_bad_file_changes_nothing_and_is_named(
    followed: Followed, tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str, named: str
) -> None:
    seen = list(followed.changes.items)
    with caplog.at_level(logging.INFO, logger="epp.endpoints.file_source"):
        (tmp_path / "endpoints.yaml").write_text(bad)
        await followed.errors.until(bool)
        assert followed.changes.items == seen
        assert {row.pod for row in followed.source.rows} == {"a", "b"}
        assert followed.source.error is not None
        assert named in followed.source.error
        (tmp_path / "endpoints.yaml").write_text(text_of("a", "c"))
        await followed.changes.until(lambda items: ("upsert", "c:8000") in items)
    assert followed.source.error is None
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 1, "once, not at every check"
    assert named in errors[0]
    assert str(tmp_path) in errors[0]


async def test_a_removed_file_keeps_the_endpoints(followed: Followed, tmp_path: Path) -> None:
    (tmp_path / "endpoints.yaml").unlink()
    await followed.errors.until(bool)
    assert {row.pod for row in followed.source.rows} == {"a", "b"}


async def test_file_and_directory_may_come_later(tmp_path: Path) -> None:
    directory = tmp_path / "later"
    followed = Followed(directory / "endpoints.yaml")
    async with running(followed.source.run()):
        await followed.errors.until(bool)
        assert not followed.source.loaded.is_set()
        directory.mkdir()
        (directory / "endpoints.yaml").write_text(text_of("a"))
        await followed.changes.until(lambda items: items == [("upsert", "a:8000")])
    assert followed.source.loaded.is_set()


async def test_an_empty_list_is_a_pool_of_nobody(followed: Followed, tmp_path: Path) -> None:
    seen = len(followed.changes.items)
    (tmp_path / "endpoints.yaml").write_text("endpoints: []\n")
    items = await followed.changes.until(lambda items: len(items) >= seen + 2)
    assert sorted(items[seen:]) == [("remove", "a"), ("remove", "b")]


async def test_cancelling_ends_it(tmp_path: Path) -> None:
    (tmp_path / "endpoints.yaml").write_text(text_of("a"))
    followed = Followed(tmp_path / "endpoints.yaml")
    task = asyncio.create_task(followed.source.run())
    await asyncio.wait_for(followed.source.loaded.wait(), BOUND_S)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert task.cancelled()


@pytest.mark.parametrize(
    "fault", [OSError(28, "No space left on device"), PermissionError(13, "denied"), None]
)
async def test_without_a_watch_the_status_is_compared(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: OSError | None,
) -> None:
    """None: the watcher's own error type, which it raises at the limit of inotify instances."""
    tries = 0

    def refuse(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        raise fault or WatchfilesRustInternalError("Too many open files (os error 24)")

    monkeypatch.setattr("epp.endpoints.file_source.awatch", refuse)
    (tmp_path / "endpoints.yaml").write_text(text_of("a"))
    followed = Followed(tmp_path / "endpoints.yaml")
    async with running(followed.source.run()):
        await followed.changes.until(lambda items: items == [("upsert", "a:8000")])
        for pod in ("b", "c"):
            (tmp_path / "endpoints.yaml").write_text(text_of("a", pod))
            await followed.changes.until(lambda items, pod=pod: ("upsert", f"{pod}:8000") in items)  # type: ignore[misc]
    assert tries > 1
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1, "once, not at every check"
    assert str(tmp_path) in warnings[0]


async def test_a_path_through_a_file_is_waited_for(tmp_path: Path) -> None:
    """NotADirectoryError from the real watcher; it becomes a directory later."""
    (tmp_path / "x").write_text("")
    followed = Followed(tmp_path / "x" / "y" / "endpoints.yaml")
    async with running(followed.source.run()) as task:
        await followed.errors.until(bool)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 2 * CHECK_INTERVAL_S)
        assert not task.done()
        (tmp_path / "x").unlink()
        (tmp_path / "x" / "y").mkdir(parents=True)
        (tmp_path / "x" / "y" / "endpoints.yaml").write_text(text_of("a"))
        await followed.changes.until(lambda items: items == [("upsert", "a:8000")])
