"""Every way in which an API server goes away or forgets, and what the reflector makes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.pool_watch.reflector import WatchRules
from tests.integration.kube.rig import add_pod, delete_pod, reflecting, set_status
from tests.kube import kinds
from tests.kube.server import KubeServer, kube_server

PAGES_OF_2 = WatchRules(page_objects=2)


async def test_lists_in_pages_then_follows(kube: KubeServer, tmp_path: Path) -> None:
    for name in "abcde":
        add_pod(kube, name)
    add_pod(kube, "other", app="else")
    async with reflecting(kube, tmp_path, rules=PAGES_OF_2) as rig:
        await kube.until_watched("pods")
        assert rig.told.log == [("replace", "a,b,c,d,e")]
        assert kube.count("list", "pods") == 3
        add_pod(kube, "f")
        set_status(kube, "a", "10.0.0.1")
        delete_pod(kube, "b")
        await rig.told.until(lambda: len(rig.told.log) == 4)
        assert rig.told.log[1:] == [("put", "f"), ("put", "a"), ("remove", "b")]
        assert rig.pauses == []


async def test_an_object_that_leaves_the_selection_is_gone(kube: KubeServer, tmp_path: Path) -> None:
    add_pod(kube, "a")
    async with reflecting(kube, tmp_path) as rig:
        await kube.until_watched("pods")
        body = dict(kube.store.get(kinds.PODS.key, "default", "a"))
        body["metadata"] = body["metadata"] | {"labels": {"app": "else"}}
        kube.store.update(kinds.PODS.key, "default", "a", body)
        await rig.told.until(lambda: not rig.told.objects)
        assert rig.told.log[-1] == ("remove", "a")


async def test_an_expired_page_token_starts_the_list_again(kube: KubeServer, tmp_path: Path) -> None:
    for name in "abc":
        add_pod(kube, name)
    held = kube.faults.hold(verb="list", times=2)
    async with reflecting(kube, tmp_path, rules=PAGES_OF_2) as rig:
        await held.reached(1)
        held.opened.set()
        held.opened = asyncio.Event()
        await held.reached(2)  # the second page is asked for, with a token
        delete_pod(kube, "a")
        kube.store.table(kinds.PODS.key).compact()
        held.stop()
        await kube.until_watched("pods")
        assert rig.told.log == [("replace", "b,c")]
        assert kube.count("list", "pods") == 3  # page, expired page, the whole in one page
        assert rig.pauses == []


async def test_a_time_out_of_the_server_resumes_without_a_list(kube: KubeServer, tmp_path: Path) -> None:
    add_pod(kube, "a")
    async with reflecting(kube, tmp_path) as rig:
        for times in (1, 2, 3):
            watch = await kube.until_watched("pods", times)
            add_pod(kube, f"b{times}")
            await rig.told.until(lambda wanted=f"b{times}": wanted in rig.told.objects)
            rig.clock.now_s += 300
            watch.end()
            await kube.notice.until(lambda gone=watch: gone not in kube.watches)
            add_pod(kube, f"c{times}")  # while nobody watches
        await kube.until_watched("pods", 4)
        await rig.told.until(lambda: "c3" in rig.told.objects)
        assert len(rig.told.objects) == 7
        assert kube.count("list", "pods") == 1
        assert rig.pauses == []
        assert rig.status.failures == 0


async def test_a_bookmark_moves_the_revision_past_what_is_forgotten(kube: KubeServer, tmp_path: Path) -> None:
    add_pod(kube, "a")
    async with reflecting(kube, tmp_path) as rig:
        watch = await kube.until_watched("pods")
        add_pod(kube, "other", app="else")  # never told: only a bookmark can say that we have passed it
        revision = str(kube.store.revision)
        held = kube.faults.hold(verb="watch")
        watch.bookmark()
        watch.end()
        await held.reached()
        kube.store.table(kinds.PODS.key).compact()
        held.stop()
        await kube.until_watched("pods", 2)
        assert kube.requests[-1].query["resourceVersion"] == revision
        assert kube.requests[-1].query["allowWatchBookmarks"] == "true"
        assert kube.count("list", "pods") == 1
        assert rig.status.expired == 0


@pytest.mark.parametrize("how", ["event", "answer"])
async def test_410_lists_again_and_finds_what_happened_meanwhile(
    kube: KubeServer, tmp_path: Path, how: str
) -> None:
    add_pod(kube, "a")
    add_pod(kube, "b")
    async with reflecting(kube, tmp_path) as rig:
        watch = await kube.until_watched("pods")
        held = kube.faults.hold(verb="list")
        if how == "event":
            watch.expire()
        else:
            kube.faults.fail(410, verb="watch", reason="Expired", times=1)
            watch.end()
            rig.clock.now_s += 300  # it has lived
        await held.reached()
        delete_pod(kube, "a")
        add_pod(kube, "c")
        assert sorted(rig.told.objects) == ["a", "b"]  # the last state, as long as there is no other
        held.stop()
        await kube.until_watched("pods", 2 if how == "event" else 3)
        assert rig.told.log == [("replace", "a,b"), ("replace", "b,c")]
        assert rig.status.expired == 1
        assert rig.pauses == []  # at once


async def test_410_again_and_again_backs_off(kube: KubeServer, tmp_path: Path) -> None:
    kube.faults.fail(410, verb="watch", reason="Expired", times=4)
    async with reflecting(kube, tmp_path) as rig:
        await kube.until_watched("pods", 5)
        assert len(rig.pauses) == 3
        assert rig.pauses[0] >= 0.8  # the second failure in a row: 1.6 s, jittered


async def test_failures_back_off_with_jitter_up_to_a_bound(kube: KubeServer, tmp_path: Path) -> None:
    kube.faults.fail(503, verb="list", times=10)
    async with reflecting(kube, tmp_path) as rig:
        await kube.until_watched("pods")
        doubled = [min(30.0, 0.8 * 2**n) for n in range(10)]
        assert len(rig.pauses) == 10
        assert all(0.5 * d <= p <= 1.5 * d for d, p in zip(doubled, rig.pauses, strict=True))
        assert len({p / d for d, p in zip(doubled, rig.pauses, strict=True)}) == 10  # jittered
        assert rig.status.failures == 10
        assert rig.status.error is None  # over


async def test_retry_after_is_respected(kube: KubeServer, tmp_path: Path) -> None:
    kube.faults.fail(429, verb="list", times=1, retry_after=17)
    kube.faults.fail(429, verb="watch", times=1, retry_after=86400)
    async with reflecting(kube, tmp_path) as rig:
        await kube.until_watched("pods")
        assert rig.pauses[0] == 17
        assert rig.pauses[1] == 120  # a day is more than anybody means


async def test_the_last_state_is_served_and_its_age_grows(kube: KubeServer, tmp_path: Path) -> None:
    add_pod(kube, "a")
    async with reflecting(kube, tmp_path) as rig:
        watch = await kube.until_watched("pods")
        rule = kube.faults.fail(503, verb="watch")
        watch.drop()
        await rig.paused.until(lambda: len(rig.pauses) > 3)
        rig.clock.now_s += 500
        assert list(rig.told.objects) == ["a"]
        assert rig.status.age_s(rig.clock.now_s) == 500
        assert "watch pods in namespace default: 503" in rig.status.error
        rule.stop()
        await kube.until_watched("pods", kube.count("watch", "pods") + 1)
        add_pod(kube, "b")
        await rig.told.until(lambda: "b" in rig.told.objects)
        assert rig.status.age_s(rig.clock.now_s) == 0
        assert rig.status.error is None
        assert kube.count("list", "pods") == 1  # resumed where it was


async def test_a_half_open_connection_is_given_up(kube: KubeServer, tmp_path: Path) -> None:
    """The server neither speaks nor closes: only the read deadline can tell."""
    async with reflecting(kube, tmp_path, rules=WatchRules(read_deadline_s=0.2)) as rig:
        watch = await kube.until_watched("pods")
        watch.freeze()
        add_pod(kube, "a")  # would never be told on that connection
        await rig.told.until(lambda: "a" in rig.told.objects)
        assert rig.status.failures >= 1
        assert kube.count("list", "pods") == 1


async def test_a_connection_that_breaks_loses_nothing(kube: KubeServer, tmp_path: Path) -> None:
    add_pod(kube, "a")
    async with reflecting(kube, tmp_path) as rig:
        watch = await kube.until_watched("pods")
        watch.send(b'{"type":"ADDED","object":{"metada')  # half an event
        watch.drop()
        add_pod(kube, "b")
        await rig.told.until(lambda: "b" in rig.told.objects)
        assert sorted(rig.told.objects) == ["a", "b"]
        assert kube.count("list", "pods") == 1


async def test_a_list_that_breaks_is_asked_for_again(kube: KubeServer, tmp_path: Path) -> None:
    for name in "abc":
        add_pod(kube, name)
    kube.faults.drop(verb="list", times=1)
    async with reflecting(kube, tmp_path, rules=PAGES_OF_2) as rig:
        await kube.until_watched("pods")
        assert rig.told.log == [("replace", "a,b,c")]
        assert rig.status.failures == 1


async def test_a_stream_that_ends_at_once_is_a_failure(kube: KubeServer, tmp_path: Path) -> None:
    """Even if it told something: a proxy that cuts every answer must not be asked without a pause."""
    async with reflecting(kube, tmp_path) as rig:
        for times in (1, 2, 3):
            watch = await kube.until_watched("pods", times)
            add_pod(kube, f"p{times}")
            watch.end()
        await kube.until_watched("pods", 4)
        assert len(rig.pauses) == 3
        assert rig.pauses[2] > rig.pauses[0]


async def test_nonsense_in_the_stream_makes_a_new_list(kube: KubeServer, tmp_path: Path) -> None:
    add_pod(kube, "a")
    async with reflecting(kube, tmp_path) as rig:
        watch = await kube.until_watched("pods")
        watch.send(b"<html>bad gateway</html>\n")
        await kube.until_watched("pods", 2)
        assert rig.told.log == [("replace", "a"), ("replace", "a")]
        assert rig.status.failures == 1


async def test_events_arrive_whole_however_they_are_cut(kube: KubeServer, tmp_path: Path) -> None:
    async with reflecting(kube, tmp_path) as rig:
        watch = await kube.until_watched("pods")
        big = "x" * 700_000  # more than one read of the connection
        line = '{"type":"ADDED","object":{"metadata":{"name":"%s","resourceVersion":"%s","x":"%s"}}}\n'
        text = (line % ("é1", "77", big) + line % ("b2", "78", "")).encode()
        for start in range(0, len(text), 99_991):
            watch.send(text[start : start + 99_991])
        await rig.told.until(lambda: len(rig.told.objects) == 2)
        assert rig.told.objects == {"é1": "77", "b2": "78"}


async def test_an_object_that_cannot_be_understood_is_left_out(kube: KubeServer, tmp_path: Path) -> None:
    async with reflecting(kube, tmp_path) as rig:
        watch = await kube.until_watched("pods")
        watch.send(b'{"type":"ADDED","object":{"metadata":{"resourceVersion":"7"}}}\n')
        add_pod(kube, "a")
        await rig.told.until(lambda: "a" in rig.told.objects)
        assert rig.status.unreadable == 1
        assert list(rig.told.objects) == ["a"]


async def test_denied_says_verb_resource_namespace_and_service_account(tmp_path: Path) -> None:
    async with kube_server() as kube:
        kube.authority.tokens["t"] = "system:serviceaccount:llm:kvpull-epp"
        async with reflecting(kube, tmp_path, token="t") as rig:
            await rig.paused.until(lambda: bool(rig.pauses))
            assert rig.status.error == (
                "ServiceAccount llm/kvpull-epp may not list pods in namespace default: grant it by a Role "
                "and a RoleBinding there"
            )
            assert not rig.reflector.synced.is_set()
            assert rig.reflector.settled.is_set()
            _grant(kube, ["get", "list"])
            await rig.told.until(lambda: bool(rig.told.log))
            await kube.notice.until(lambda: kube.count("watch", "pods") > 0)
            await rig.paused.until(lambda: "may not watch pods" in (rig.status.error or ""))
            _grant(kube, ["watch"], name="more")
            await kube.until_watched("pods", kube.count("watch", "pods") + 1)


def _grant(kube: KubeServer, verbs: list[str], name: str = "reader") -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": verbs}
    kube.store.create(kinds.ROLES.key, "default", {"metadata": {"name": name}, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": "kvpull-epp", "namespace": "llm"}
    ref = {"kind": "Role", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
    body = {"metadata": {"name": name}, "subjects": [subject], "roleRef": ref}
    kube.store.create(kinds.ROLE_BINDINGS.key, "default", body)
