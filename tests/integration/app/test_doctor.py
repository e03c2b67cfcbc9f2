"""The doctor's gatherers over real HTTP: what they learn, that they end, and what they never send or say."""

from __future__ import annotations

import asyncio
import email.utils
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from epp import cli
from epp.debug import MAX_PROBE_BYTES, build_debug_app, token_digest
from epp.ops.doctor.calls import Caller
from epp.ops.doctor.pages import listed
from epp.thresholds.in_force import ThresholdState
from tests.unit.core.rows import info
from tests.unit.core.test_endpoint_picker import Pool
from tests.unit.director.rig import Rig

TOKEN = "s3cret-of-the-picker"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
Serve = Callable[[web.Application], Awaitable[str]]


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return str(path)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[TestServer] = []

    async def start(app: web.Application) -> str:
        server = TestServer(app)
        await server.start_server(access_log=None, shutdown_timeout=0.1)
        servers.append(server)
        return str(server.make_url("/")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


async def kvpull(*arguments: str) -> int:
    return await asyncio.to_thread(cli.main, ("doctor", *arguments))


def stub(routes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]) -> web.Application:
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    return app


def answering(body: Any, **headers: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        if isinstance(body, str):
            return web.Response(text=body, headers=headers)
        return web.json_response(body, headers=headers)

    return answer


def picker_of(
    *engines: str, endpoints: Callable[[web.Request], Awaitable[web.Response]] | None = None
) -> web.Application:
    """A picker's pages that list engines by URL; `endpoints` in place of its list."""
    thresholds = {"configured": True, "active": True, "rejected": None, "rules": []}
    return stub(
        {
            "/debug/kvpull/endpoints": endpoints or answering(listing(*engines)),
            "/debug/kvpull/thresholds": answering(thresholds),
            "/metrics": answering(""),
        }
    )


def listing(*engines: str) -> list[dict[str, Any]]:
    return [
        {
            "pod": f"pod-{n}",
            "rank": 0,
            "address": url.removeprefix("http://"),
            "state": "live",
            "waiting": 0.0,
            "metrics_age_s": 0.1,
            "block_size_tokens": 16,
            "blocks_cpu": 0,
            "info": None,
            "differs_from_pool": False,
            "hashes_unlike": None,
            "events": {},
            "refused_peers": [],
            "draining": False,
        }
        for n, url in enumerate(engines)
    ]


async def test_the_tokens_page_tells_a_count_and_a_digest_and_nothing_else() -> None:
    rig = Rig()
    app = build_debug_app(
        rig.pool.picker, CollectorRegistry(), ThresholdState, TOKEN, token_ids=rig.director.token_ids
    )
    url, body = "/debug/kvpull/tokens?path=/v1/completions", {"prompt": "the harbour at seven", "model": "m"}
    ids = await rig.director.token_ids("/v1/completions", json.dumps(body).encode())
    assert ids
    async with TestClient(TestServer(app)) as client:
        assert (await client.post(url, json=body)).status == 401
        answer = await client.post(url, json=body, headers=AUTH)
        assert await answer.json() == {"count": len(ids), "sha256": token_digest(ids)}
        unknown = await client.post("/debug/kvpull/tokens?path=/v1/x", json=body, headers=AUTH)
        assert await unknown.json() == {"count": None, "sha256": None}
        assert (await client.post(url, data=b"{", headers=AUTH)).status == 400
        long = {"prompt": "x" * (MAX_PROBE_BYTES + 1)}
        assert (await client.post(url, json=long, headers=AUTH)).status == 413
    assert rig.requests == [], "nothing was decided"


def test_the_digest_depends_on_every_token_and_their_order() -> None:
    assert token_digest([1, 2]) != token_digest([2, 1])
    assert token_digest([1]) != token_digest([1, 0])
    assert token_digest([256]) != token_digest([1])


async def test_a_real_pickers_page_is_understood(serve: Serve) -> None:
    pool = Pool()
    pool.hold("b")
    pool.metrics("b", waiting=9.0, info=info(seed_fp="other"))
    app = build_debug_app(
        pool.picker,
        CollectorRegistry(),
        ThresholdState,
        TOKEN,
        clock=lambda: 0.0,
        ports=lambda _: {"events_port": 5557, "replay_port": None},
    )
    async with TestClient(TestServer(app)) as client:
        body = await (await client.get("/debug/kvpull/endpoints", headers=AUTH)).json()
    rows = {row.name: row for row in listed(body)}
    assert (rows["b/0"].state, rows["b/0"].cpu_blocks, rows["b/0"].waiting_known) == ("live", 200, True)
    assert (rows["b/0"].events_port, rows["b/0"].replay_port) == (5557, None)
    assert rows["b/0"].info is not None
    assert rows["b/0"].info["seed_fp"] == "other"
    assert rows["a/0"].info is None


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("dead", "refused"),
        ("401", "the token is wrong"),
        ("404", "no picker of this release"),
        ("strange", "its answer is not a picker's"),
        ("silent", "no answer within 0.2 s"),
    ],
)
async def test_a_picker_that_cannot_be_asked(
    case: str,
    said: str,
    serve: Serve,
    token_file: str,
    unused_tcp_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = asyncio.Event()

    async def refuse(_: web.Request) -> web.Response:
        raise web.HTTPUnauthorized

    async def hang(_: web.Request) -> web.Response:
        await gone.wait()
        return web.Response()

    urls = {
        "dead": f"http://127.0.0.1:{unused_tcp_port}",
        "401": await serve(stub({"/{any:.*}": refuse})),
        "404": await serve(stub({})),
        "strange": await serve(stub({"/{any:.*}": answering([1, 2])})),
        "silent": await serve(stub({"/{any:.*}": hang})),
    }
    timeout = "0.2" if case == "silent" else "20"
    status = await kvpull("--url", urls[case], "--token-file", token_file, "--timeout", timeout)
    gone.set()
    printed = capsys.readouterr()
    assert status == 3
    assert said in printed.out
    assert "FAULT pickers" in printed.out
    assert TOKEN not in printed.out + printed.err


async def test_every_picker_behind_a_name_is_asked(
    serve: Serve, token_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two answer at two addresses, the third is dead: a Service would have shown one of them."""
    port = aiohttp.client.URL(await serve(picker_of())).port
    second = TestServer(picker_of(), host="127.0.0.2", port=port)
    await second.start_server(access_log=None, shutdown_timeout=0.1)
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in (3, 1, 2, 1)]

    def look_up(host: str, *rest: Any, **more: Any) -> Any:
        return addresses if host == "epp.test" else resolve(host, *rest, **more)

    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        asked = (
            "--url",
            f"http://epp.test:{port}",
            "--token-file",
            token_file,
            "--passive",
            "--json",
        )
        status = await kvpull(*asked)
    finally:
        await second.close()
    rows = json.loads(capsys.readouterr().out)
    said = json.dumps(next(row for row in rows["checks"] if row["name"] == "pickers"))
    assert status == 1
    assert "refused" in said
    assert all(said.count(f"http://127.0.0.{n}:{port}") == 1 for n in (1, 2, 3)), said  # 1 and 2 know nobody


async def test_the_token_goes_to_pickers_only(serve: Serve, token_file: str) -> None:
    """Neither to an engine, nor to the gateway, nor where a redirect points."""
    asked: list[tuple[str, str]] = []

    async def listen(request: web.Request) -> web.Response:
        asked.append((request.path, request.headers.get("Authorization", "")))
        raise web.HTTPFound(f"{thief}/stolen")

    thief = await serve(stub({"/{any:.*}": listen}))
    engine, gateway = await serve(stub({"/{any:.*}": listen})), await serve(stub({"/{any:.*}": listen}))
    picker = await serve(picker_of(engine))
    status = await kvpull("--url", picker, "--token-file", token_file, "--gateway", gateway)
    assert status == 1
    assert {path for path, _ in asked} >= {"/metrics", "/v1/completions"}
    assert {sent for _, sent in asked} == {""}
    assert "/stolen" not in {path for path, _ in asked}


async def test_passive_sends_no_prompt(
    serve: Serve, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    async def listen(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.Response(text="vllm:num_requests_waiting 0\n")

    engines = [await serve(stub({"/{any:.*}": listen})) for _ in range(2)]
    picker = await serve(picker_of(*engines))
    assert await kvpull("--url", picker, "--token-file", token_file, "--passive") == 0
    assert set(asked) == {"GET"}
    assert "left out (--passive)" in capsys.readouterr().out


@pytest.mark.parametrize("looks_until_heard", [0, 3, None])
async def test_a_picker_that_has_just_started_is_given_time(
    looks_until_heard: int | None, serve: Serve, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """'Not yet' is no fault; 'never' is, once the settling time is over."""
    engine = await serve(stub({"/{any:.*}": answering("vllm:num_requests_waiting 0\n")}))
    heard = listing(engine)
    unheard = [{**row, "state": "syncing", "metrics_age_s": None} for row in heard]
    looks = 0

    async def endpoints(_: web.Request) -> web.Response:
        nonlocal looks
        looks += 1
        known = looks_until_heard is not None and looks > looks_until_heard
        return web.json_response(heard if known else unheard)

    picker = await serve(picker_of(engine, endpoints=endpoints))
    settle_s = "0.2" if looks_until_heard is None else "30"
    status = await kvpull("--url", picker, "--token-file", token_file, "--passive", "--settle", settle_s)
    printed = capsys.readouterr().out
    if looks_until_heard is None:
        assert status == 1
        assert "scraped its /metrics never" in printed
    else:
        assert status == 0, printed
        assert looks == looks_until_heard + 1, "it asks no longer than it has to"


async def test_a_clock_that_is_wrong_is_found(
    serve: Serve, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = email.utils.formatdate(time.time() - 3600, usegmt=True)
    engine = await serve(stub({"/{any:.*}": answering("vllm:num_requests_waiting 0\n", Date=wrong)}))
    picker = await serve(picker_of(engine))
    assert await kvpull("--url", picker, "--token-file", token_file, "--passive") == 1
    printed = capsys.readouterr().out
    assert "FAULT clocks: pod-0/0: its clock and a picker's are 36" in printed


async def test_an_endless_answer_ends(serve: Serve) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65_536)

    url = await serve(stub({"/": drip}))
    async with aiohttp.ClientSession() as session:
        reply = await Caller(session, timeout_s=20.0).get(url)
    assert len(reply.text) == 8 << 20


async def test_wrong_usage(token_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short"
    short.write_text("x")
    for wrong in (
        ("--url", "ftp://x"),
        ("--gateway", "x:1"),
        ("--routing-key-file", str(short)),
        ("--routing-key-file", str(tmp_path / "absent")),
    ):
        assert await kvpull("--token-file", token_file, *wrong) == 2
        assert wrong[0] in capsys.readouterr().err


class StockEngine:
    """A stock vLLM as far as the doctor looks: no kvpull metric. `pulls`: it understands the source header
    (as its sidecar would); `token_ids`: what its tokenizer gives for any text."""

    def __init__(self, *, pulls: bool, token_ids: list[int]) -> None:
        self.prompts: list[str] = []
        self._pulls, self._token_ids = pulls, token_ids
        self._external = 0

    def app(self) -> web.Application:
        return stub(
            {
                "/metrics": self._metrics,
                "/v1/models": answering({"data": [{"id": "llama"}]}),
                "/tokenize": answering({"tokens": self._token_ids}),
                "/v1/completions": self._complete,
            }
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        page = 'vllm:num_requests_waiting 0\nvllm:external_prefix_cache_hits_total{engine="0"} %d\n'
        return web.Response(text=page % self._external)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.prompts.append(body["prompt"])
        if self._pulls and "x-kv-cache-source-host-port" in request.headers:
            self._external += 384
        return web.json_response({"usage": {"prompt_tokens": 400}})


def with_tokens(app: web.Application, token_ids: list[int]) -> web.Application:
    answer = {"count": len(token_ids), "sha256": token_digest(token_ids)}
    app.router.add_post("/debug/kvpull/tokens", answering(answer))
    return app


@pytest.mark.parametrize(
    ("pulls", "token_ids", "expected"),
    [
        ((True, True), [1, 2, 3], []),
        ((True, False), [1, 2, 3], [("key names", "pod-1/0")]),
        ((True, True), [1, 2, 4], [("tokens equal", "pod-0/0"), ("tokens equal", "pod-1/0")]),
    ],
)
async def test_stock_engines_are_judged_by_their_own_counters(
    pulls: tuple[bool, bool],
    token_ids: list[int],
    expected: list[tuple[str, str]],
    serve: Serve,
    token_file: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines = [StockEngine(pulls=able, token_ids=[1, 2, 3]) for able in pulls]
    picker = await serve(with_tokens(picker_of(*[await serve(e.app()) for e in engines]), token_ids))
    arguments = ("--url", picker, "--token-file", token_file, "--settle", "0.1", "--json")
    assert await kvpull(*arguments) == int(bool(expected))
    printed = capsys.readouterr().out
    document = json.loads(printed)
    found = {(c["name"], f["place"]) for c in document["checks"] for f in c["findings"]}
    assert sorted(found) == expected
    prompts = [prompt for engine in engines for prompt in engine.prompts]
    assert len(prompts) == 4, "each computes one and pulls one"
    assert len({prompt[:32] for prompt in prompts}) == 2, "a source's prompt is what is pulled from it"
    assert not any(word in printed for prompt in prompts for word in prompt.split()[:1])
