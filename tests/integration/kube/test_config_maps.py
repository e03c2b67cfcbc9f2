"""Thresholds from watched ConfigMaps: what is in force, what is refused, and who hears of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epp.core.thresholds import EVERYWHERE, PullThresholds
from epp.thresholds.choice import ThresholdChoice
from epp.thresholds.config_maps import ConfigMapThresholds, Refused
from epp.thresholds.directory_source import DirectoryThresholds
from epp.thresholds.refusal_events import MAX_PER_HOUR, MAX_WAITING, RefusalEvents
from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.resources import CONFIG_MAPS, Selection
from tests.integration.kube.rig import FAST, Clock, open_access, running
from tests.kube import kinds
from tests.kube.notice import Notice
from tests.kube.server import KubeServer

NAMED = [Selection.named(CONFIG_MAPS, "default", "pulls")]


def document(delta: int | str) -> str:
    spec = f"{{default: {{minCachedTokenDelta: {delta}}}}}"
    return f"apiVersion: kvpull/v1alpha1\nkind: PullThresholds\nspec: {spec}\n"


def config_map(name: str, data: dict[str, str], **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}, "data": data}


def put(kube: KubeServer, body: dict[str, Any]) -> None:
    name = body["metadata"]["name"]
    if ("default", name) in kube.store.table(kinds.CONFIG_MAPS.key).objects:
        kube.store.update(kinds.CONFIG_MAPS.key, "default", name, body)
    else:
        kube.store.create(kinds.CONFIG_MAPS.key, "default", body)


def delta_of(thresholds: PullThresholds) -> int | None:
    settings = thresholds.rules.get(EVERYWHERE)
    return settings.min_cached_token_delta if settings is not None else None


def pulls_off(thresholds: PullThresholds) -> bool:
    settings = thresholds.rules.get(EVERYWHERE)
    return settings is not None and settings.enabled is False


class Thresholds:
    """What has come into force, one after the other."""

    def __init__(self, access: KubeAccess, selections: list[Selection], directory: Path | None) -> None:
        self.log: list[PullThresholds] = []
        self.refused: list[Refused] = []
        self.notice = Notice()
        self.choice = ThresholdChoice(self._take)
        self.watch = ConfigMapThresholds(
            access, selections, self.choice.from_watch, on_refused=self._refuse, rules=FAST
        )
        self.directory = None
        if directory is not None:
            self.directory = DirectoryThresholds(directory, self.choice.from_directory)
        self.choice.connect(self.directory, self.watch)

    def _take(self, thresholds: PullThresholds) -> None:
        self.log.append(thresholds)
        self.notice.tell()

    def _refuse(self, refused: Refused) -> None:
        self.refused.append(refused)
        self.notice.tell()

    async def until_delta(self, delta: int | None) -> None:
        await self.notice.until(lambda: bool(self.log) and delta_of(self.log[-1]) == delta)


Start = Callable[..., Any]


@pytest.fixture
def start(kube: KubeServer, tmp_path: Path) -> Start:
    @asynccontextmanager
    async def _start(
        selections: list[Selection] = NAMED, *, directory: Path | None = None, token: str = ""
    ) -> AsyncIterator[Thresholds]:
        async with open_access(kube, tmp_path, token=token) as access:
            thresholds = Thresholds(access, selections, directory)
            await thresholds.choice.refresh()
            async with running(thresholds.choice.run()):
                yield thresholds

    return _start


async def test_a_change_comes_into_force(kube: KubeServer, start: Start) -> None:
    put(kube, config_map("pulls", {"a.yaml": document(100), "notes.txt": "no document"}))
    async with start() as thresholds:
        await thresholds.choice.wait_settled()
        assert delta_of(thresholds.log[-1]) == 100
        put(kube, config_map("pulls", {"a.yaml": document(200)}))
        await thresholds.until_delta(200)
        state = thresholds.choice.state
        assert state.documents == ("pulls/a.yaml",)
        assert state.source == "API watch of configmaps in default (metadata.name=pulls)"
        assert [t.generation for t in thresholds.log] == [1, 2]
        asked = [seen.query for seen in kube.requests if seen.plural == "configmaps"]
        assert {query["fieldSelector"] for query in asked} == {"metadata.name=pulls"}


async def test_a_bad_change_keeps_the_last_good_one_and_is_told(kube: KubeServer, start: Start) -> None:
    put(kube, config_map("pulls", {"a.yaml": document(100)}))
    async with start() as thresholds:
        await thresholds.until_delta(100)
        put(kube, config_map("pulls", {"a.yaml": document(-1)}))
        await thresholds.notice.until(lambda: bool(thresholds.refused))
        assert thresholds.refused[0].config_map == "pulls"
        assert "pulls/a.yaml: spec.default.minCachedTokenDelta" in thresholds.refused[0].why
        assert thresholds.choice.state.rejected == thresholds.refused[0].why
        assert [delta_of(t) for t in thresholds.log] == [100]
        put(kube, config_map("pulls", {"a.yaml": document(300)}))
        await thresholds.until_delta(300)
        assert thresholds.choice.state.rejected is None


async def test_a_config_map_without_documents_is_a_mistake(kube: KubeServer, start: Start) -> None:
    put(kube, config_map("pulls", {"thresholds": document(100)}))
    async with start() as thresholds:
        await thresholds.choice.wait_settled()
        assert thresholds.refused[0].why == "pulls: none of its keys ends in .yaml or .yml"
        assert pulls_off(thresholds.log[-1])


async def test_before_the_first_good_content_pulls_are_off(kube: KubeServer, start: Start) -> None:
    put(kube, config_map("pulls", {"a.yaml": "kind: [broken"}))
    async with start() as thresholds:
        await thresholds.choice.wait_settled()
        assert pulls_off(thresholds.log[-1])
        put(kube, config_map("pulls", {"a.yaml": document(5)}))
        await thresholds.until_delta(5)


async def test_several_merge_by_name_and_by_label(kube: KubeServer, start: Start) -> None:
    put(kube, config_map("z", {"a.yaml": document(2)}, team="a"))
    put(kube, config_map("b", {"a.yaml": document(1)}, team="a"))
    put(kube, config_map("c", {"a.yaml": document(9)}, team="other"))
    async with start([Selection(CONFIG_MAPS, "default", labels="team=a")]) as thresholds:
        await thresholds.until_delta(2)
        assert thresholds.choice.state.documents == ("b/a.yaml", "z/a.yaml")
        kube.store.delete(kinds.CONFIG_MAPS.key, "default", "z")
        await thresholds.until_delta(1)


async def test_nothing_is_in_force_before_all_have_been_seen(kube: KubeServer, start: Start) -> None:
    for name, delta in (("one", 1), ("two", 2)):
        put(kube, config_map(name, {"a.yaml": document(delta)}))
    held = kube.faults.hold(verb="list", plural="configmaps", times=1)
    async with start(
        [Selection.named(CONFIG_MAPS, "default", name) for name in ("one", "two")]
    ) as thresholds:
        await held.reached()
        await kube.until_watched("configmaps")  # the other one
        assert (thresholds.log, thresholds.choice.settled) == ([], False)
        held.stop()
        await thresholds.until_delta(2)
        assert len(thresholds.log) == 1


async def test_the_last_good_stays_while_the_server_is_away(kube: KubeServer, start: Start) -> None:
    put(kube, config_map("pulls", {"a.yaml": document(100)}))
    async with start() as thresholds:
        watch = await kube.until_watched("configmaps")
        rule = kube.faults.fail(503, plural="configmaps")
        watch.drop()
        await rule.reached(3)
        put(kube, config_map("pulls", {"a.yaml": document(200)}))
        assert [delta_of(t) for t in thresholds.log] == [100]
        assert thresholds.choice.state.rejected is None
        rule.stop()
        await thresholds.until_delta(200)


async def test_without_the_right_to_read_pulls_are_off_and_the_reason_is_shown(
    kube: KubeServer, start: Start
) -> None:
    kube.authority.tokens["t"] = "system:serviceaccount:default:epp"
    async with start(token="t") as thresholds:
        await thresholds.choice.wait_settled()
        assert pulls_off(thresholds.log[-1])
        told = "ServiceAccount default/epp may not list configmaps in namespace default"
        assert told in str(thresholds.choice.state.rejected)


async def test_the_watch_wins_over_the_directory_and_gives_back(
    kube: KubeServer, start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    (folder / "a.yaml").write_text(document(1))
    async with start(directory=folder) as thresholds:
        await kube.until_watched("configmaps")
        assert [delta_of(t) for t in thresholds.log] == [1]  # the ConfigMap does not exist
        put(kube, config_map("pulls", {"a.yaml": document(2)}))
        await thresholds.until_delta(2)
        assert thresholds.choice.state.source.startswith("API watch")
        (folder / "a.yaml").write_text(document(3))
        assert thresholds.directory is not None
        await thresholds.directory.refresh()
        assert delta_of(thresholds.log[-1]) == 2
        kube.store.delete(kinds.CONFIG_MAPS.key, "default", "pulls")
        await thresholds.until_delta(3)
        assert thresholds.choice.state.source.startswith("directory")
        assert [t.generation for t in thresholds.log] == [1, 2, 3]


async def test_a_watch_that_is_denied_leaves_the_directory_in_force(
    kube: KubeServer, start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    (folder / "a.yaml").write_text(document(1))
    kube.authority.tokens["t"] = "jane"
    async with start(directory=folder, token="t") as thresholds:
        await thresholds.choice.wait_settled()
        assert [delta_of(t) for t in thresholds.log] == [1]
        assert "user jane may not list configmaps" in str(thresholds.choice.state.rejected)


# --- Events ----------------------------------------------------------------------------------------


def refused(number: int = 0) -> Refused:
    return Refused("pulls", "uid-1", f"pulls/a.yaml: spec: wrong {number}")


async def test_a_refusal_becomes_an_event(kube: KubeServer, tmp_path: Path) -> None:
    async with open_access(kube, tmp_path) as access:
        events = RefusalEvents(access, "default")
        async with running(events.run()):
            events.tell(refused())
            events.tell(refused())
            table = kube.store.table(kinds.EVENTS.key)
            await kube.notice.until(lambda: len(table.objects) == 1)
            events.tell(refused(2))
            await kube.notice.until(lambda: len(table.objects) == 2)
        first = next(iter(table.objects.values()))
        assert first["involvedObject"]["name"] == "pulls"
        assert first["involvedObject"]["uid"] == "uid-1"
        assert (first["type"], first["reason"]) == ("Warning", "PullThresholdsRefused")
        assert "pulls/a.yaml: spec: wrong 0" in first["message"]


async def test_events_are_bounded(kube: KubeServer, tmp_path: Path) -> None:
    clock = Clock()
    async with open_access(kube, tmp_path) as access:
        events = RefusalEvents(access, "default", clock=clock)
        for number in range(100):
            events.tell(refused(number))
        assert events.dropped == 100 - MAX_WAITING
        async with running(events.run()):
            written = MAX_WAITING
            while written < MAX_PER_HOUR:
                await kube.notice.until(lambda wanted=written: kube.count("create", "events") == wanted)
                events.tell(refused(1000 + written))
                written += 1
            await kube.notice.until(lambda: kube.count("create", "events") == MAX_PER_HOUR)
            before = events.dropped
            events.tell(refused(5000))
            assert events.dropped == before + 1
            clock.now_s += 3601
            events.tell(refused(5001))
            await kube.notice.until(lambda: kube.count("create", "events") == MAX_PER_HOUR + 1)


async def test_without_the_right_to_write_events_there_are_none(kube: KubeServer, tmp_path: Path) -> None:
    kube.authority.tokens["t"] = "jane"
    async with open_access(kube, tmp_path, token="t") as access:
        events = RefusalEvents(access, "default")
        async with running(events.run()):
            events.tell(refused(1))
            await kube.notice.until(lambda: kube.count("create", "events") == 1)
            events.tell(refused(2))  # may still be tried
    assert kube.store.table(kinds.EVENTS.key).objects == {}
