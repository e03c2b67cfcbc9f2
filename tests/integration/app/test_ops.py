"""`kvpull explain` and `thresholds show` against real pickers' debug ports, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry

from epp import cli
from epp.core.thresholds import EVERYWHERE, PullSettings, PullThresholds, Scope
from epp.core.types import Outcome
from epp.debug import build_debug_app
from epp.thresholds.in_force import ThresholdState
from tests.unit.core.rows import info
from tests.unit.core.test_endpoint_picker import Pool
from tests.unit.core.test_pull_lifecycle import busy_pool, report

TOKEN = "s3cret"


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., object]]:
    servers: list[TestServer] = []

    async def start(app: web.Application) -> str:
        server = TestServer(app)
        await server.start_server(access_log=None)
        servers.append(server)
        return str(server.make_url("/")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


def picker_app(pool: Pool, state: ThresholdState | None = None) -> web.Application:
    state = state or ThresholdState()
    return build_debug_app(pool.picker, CollectorRegistry(), lambda: state, TOKEN, clock=lambda: 0.0)


async def kvpull(*arguments: str) -> int:
    """The command as a process would run it, in a thread: it blocks."""
    return await asyncio.to_thread(cli.main, arguments)


async def test_a_pull_is_explained_by_the_replica_that_made_it(
    serve: Callable[..., object], token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = busy_pool()
    decision = pool.ask("my/request 1")
    pool.picker.pull_finished(
        report(decision.decision_id, received_tokens=1600, reason="shortfall"), decision.computing
    )
    outcome = Outcome(status=200, completed=True, ttft_s=0.25, cached_tokens=1600)
    pool.picker.release(decision.decision_id, outcome)
    other, own = await serve(picker_app(Pool())), await serve(picker_app(pool))  # type: ignore[misc]
    for name in ("my/request 1", decision.decision_id):
        status = await kvpull("explain", name, "--url", other, "--url", own, "--token-file", token_file)
        said = capsys.readouterr()
        assert status == 0
        assert "kvpull:" not in said.err
        assert f"decision {decision.decision_id} of request my/request 1 (m)" in said.out
        assert "source b/0 (10.0.0.1:8000), unverified: a peer holds enough more" in said.out
        assert "minCachedTokenDelta 100, thresholds generation 0" in said.out
        assert "it can serve 3200 tokens, 3200 more than held" in said.out
        assert "considered b: 3200 tokens, weight 0.0196 (100% of those shown)" in said.out
        assert "1600 of 3200 tokens asked came (3200 were promised), 1048576 bytes in 12.5 ms" in said.out
        assert "shortfall; the rest was computed" in said.out
        assert "answer: status 200, complete, first token after 0.250 s, the engine counted 1600" in said.out
    assert await kvpull("explain", "my/request 1", "--url", own, "--token-file", token_file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["source"]["pod"] == "b"


async def test_no_source_is_explained_too(
    serve: Callable[..., object], token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = busy_pool()
    for pod, seed in (("a", "s"), ("b", "other"), ("c", "s")):
        pool.metrics(pod, waiting=50.0 * (pod == "b"), info=info(seed_fp=seed, instance=pod))
    pool.ask("r\x1b[2J", token_ids=list(range(3205)))
    url = await serve(picker_app(pool))  # type: ignore[misc]
    assert await kvpull("explain", "r\x1b[2J", "--url", url, "--token-file", token_file) == 0
    said = capsys.readouterr().out
    assert "no source: incompatible: the best holder's block size, hash, model or layout differs" in said
    assert "passed over b/0: incompatible" in said
    assert "the answer has not ended yet" in said
    assert "\x1b" not in said, "what a client chose does not drive the terminal"


async def test_what_explain_says_when_it_cannot_say(
    serve: Callable[..., object],
    token_file: str,
    tmp_path: Path,
    unused_tcp_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = await serve(picker_app(Pool()))  # type: ignore[misc]
    dead = f"http://127.0.0.1:{unused_tcp_port}"
    assert await kvpull("explain", "x", "--url", url, "--token-file", token_file) == 1
    assert "no decision 'x' is known" in capsys.readouterr().err
    assert await kvpull("explain", "x", "--url", url, "--url", dead, "--token-file", token_file) == 3
    assert f"{dead}: " in capsys.readouterr().err
    wrong = tmp_path / "wrong"
    wrong.write_text("nonsense")
    assert await kvpull("explain", "x", "--url", url, "--token-file", str(wrong)) == 3
    assert "401" in capsys.readouterr().err
    for bad in ("ftp://h", "h:9090", "http://h/?q=1"):
        assert await kvpull("explain", "x", "--url", bad, "--token-file", token_file) == 2
    assert await kvpull("explain", "x", "--url", url, "--token-file", str(tmp_path / "absent")) == 2
    wrong.write_text("two\nlines")
    assert await kvpull("explain", "x", "--url", url, "--token-file", str(wrong)) == 2


async def test_the_token_goes_nowhere_else(
    serve: Callable[..., object], token_file: str, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Neither where a redirect points nor to a proxy of the environment."""
    asked: list[str] = []

    async def thief(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization", ""))
        return web.json_response({})

    async def redirect(_: web.Request) -> web.Response:
        raise web.HTTPFound(f"{stolen}/x")

    stealing, redirecting = web.Application(), web.Application()
    stealing.router.add_get("/{any:.*}", thief)
    redirecting.router.add_get("/{any:.*}", redirect)
    stolen = await serve(stealing)  # type: ignore[misc]
    url = await serve(redirecting)  # type: ignore[misc]
    monkeypatch.setenv("http_proxy", stolen)
    assert await kvpull("explain", "x", "--url", url, "--token-file", token_file) == 3
    dead = f"http://127.0.0.1:{unused_tcp_port}"
    assert await kvpull("explain", "x", "--url", dead, "--token-file", token_file) == 3
    assert asked == []


@pytest.mark.parametrize("body", [b"not json", b"[" * 100_000, b" " * (9 << 20), b"[]", b"{}"])
async def test_a_strange_answer_is_a_fault_of_that_picker(
    serve: Callable[..., object], token_file: str, body: bytes
) -> None:
    async def strange(_: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/{any:.*}", strange)
    url = await serve(app)  # type: ignore[misc]
    assert await kvpull("explain", "x", "--url", url, "--token-file", token_file) == 3
    assert await kvpull("thresholds", "show", "--url", url, "--token-file", token_file) == 3


async def test_thresholds_show(
    serve: Callable[..., object], token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = {
        EVERYWHERE: PullSettings(min_cached_token_delta=2048),
        Scope(model="big", source_class="far"): PullSettings(enabled=False, cost_margin_ms=1.5),
    }
    thresholds = PullThresholds(rules, 4)
    state = ThresholdState(thresholds, None, ("b.yaml: replaced",), ("a.yaml", "b.yaml"), "directory /t")
    pools = [Pool(), Pool()]
    pools[0].picker.sources.set_thresholds(thresholds)
    first, second = await serve(picker_app(pools[0], state)), await serve(picker_app(pools[1]))  # type: ignore[misc]
    assert await kvpull("thresholds", "show", "--url", first, "--token-file", token_file) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{first}: pulls on, generation 4, from directory /t",
        "  warning: b.yaml: replaced",
        "  documents: a.yaml, b.yaml",
        "  for all requests: minCachedTokenDelta 2048, requireVerified False, inflightAwareness True, "
        "maxInflightPulls None, mode threshold",
        "  default: minCachedTokenDelta 2048",
        "  model=big sourceClass=far: enabled False, cost.marginMs 1.5",
    ]
    both = ("--url", first, "--url", second, "--token-file", token_file)
    assert await kvpull("thresholds", "show", *both) == 1
    assert "do not have the same thresholds" in capsys.readouterr().err
    assert await kvpull("thresholds", "show", *both, "--json") == 1
    assert json.loads(capsys.readouterr().out)[first]["generation"] == 4
    refused = ThresholdState(thresholds, "b.yaml: spec.x: unknown field")
    third = await serve(picker_app(pools[0], refused))  # type: ignore[misc]
    assert await kvpull("thresholds", "show", "--url", third, "--token-file", token_file) == 1
    assert "NOT IN FORCE, refused: b.yaml: spec.x: unknown field" in capsys.readouterr().out


async def test_thresholds_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = "apiVersion: kvpull/v1alpha1\nkind: PullThresholds\n"
    for name, tokens in (("a.yaml", 1), ("b.yaml", 2)):
        (tmp_path / name).write_text(f"{head}spec: {{default: {{minCachedTokenDelta: {tokens}}}}}")
    (tmp_path / "bad.yaml").write_text(f"{head}spec: {{defaults: {{}}}}")
    assert cli.main(["thresholds", "check", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "warning: b.yaml: spec.default.minCachedTokenDelta: 2 replaces 1 of a.yaml",
        "default: minCachedTokenDelta 2",
    ]
    assert cli.main(["thresholds", "check", str(tmp_path / "bad.yaml")]) == 2
    assert "bad.yaml: spec.defaults: unknown field; allowed: default, overrides" in capsys.readouterr().err
