"""S-B08 to S-B10, S-B12, S-A12: odd and broken bodies through a real Envoy and a real picker, by bytes."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest
import pytest_asyncio

from tests.integration.app.plain_picker import picker
from tests.integration.engine.rig import TOKENIZER
from tests.integration.extproc import envoy
from tests.integration.extproc.upstream import ANSWER, REFUSAL, Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT = aiohttp.ClientTimeout(total=30)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MARK = "zebra4711"
JSON = "application/json"


@dataclass
class Site:
    url: str
    engine: Upstream

    async def ask(
        self, path: str, body: bytes, content_type: str = JSON, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        named = {"content-type": content_type, **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.post(self.url + path, data=io.BytesIO(body), headers=named) as answer,
        ):
            lower = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, lower, await answer.read()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("hostile")
    engine = Upstream("a")
    await engine.start()
    host, _, port = engine.address.rpartition(":")
    row = {"pod": "a", "host": host, "serving_port": int(port)}
    (folder / "endpoints.json").write_text(json.dumps({"endpoints": [row]}))
    try:
        async with (
            picker(folder, ("--tokenizer", str(TOKENIZER))) as (_, ports),
            envoy.running(ports["grpc_port"], folder, [engine.address]) as urls,
        ):
            yield Site(urls["duplex"], engine)
    finally:
        await engine.stop()


def work(engine: Upstream) -> list[bytes]:
    """Bodies that arrived: a scrape has none."""
    found = [body for body in engine.bodies if body]
    engine.bodies.clear()
    return found


BROKEN = {
    "cut": b'{"model":"m","prompt":"zebra4711',
    "comma": b'{"model":"m","prompt":"zebra4711",}',
    "no_json": b"zebra4711",
    "latin_1": '{"model":"m","prompt":"zebra4711 \xe9"}'.encode("latin-1"),
    "only_a_mark": b"\xef\xbb\xbf",
    "utf_16_cut": '{"model":"m","prompt":"zebra4711"}'.encode("utf-16")[:-3],
    "two_objects": b'{"model":"m","prompt":"a"}{"prompt":"zebra4711"}',
    "control": b'{"model":"m","prompt":"zebra4711 \x01"}',
    "bare_word": b'{"model":"m","prompt":undefined}',
    "single_quotes": b"{'model':'m','prompt':'zebra4711'}",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(
    "path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/inference/v1/generate"]
)
async def test_s_b10_broken_json_gets_one_stable_400_and_no_hint_to_try_again(
    site: Site, name: str, path: str
) -> None:
    work(site.engine)
    status, headers, body = await site.ask(path, BROKEN[name])
    again, _, same = await site.ask(path, BROKEN[name])
    assert (status, again, body) == (400, 400, same)
    error = json.loads(body)["error"]
    assert error["message"].startswith("the body is not valid JSON")
    assert MARK not in body.decode() + str(headers)
    assert headers["content-type"] == JSON
    assert headers["x-llm-d-request-dropped-reason"] == "bad-request"
    assert "retry-after" not in headers
    assert work(site.engine) == []
    status, _, _ = await site.ask(path, b'{"model":"m","prompt":"alive"}')  # the picker lives, and reads on
    assert status == 200
    assert work(site.engine) == [b'{"model":"m","prompt":"alive"}']


def _chat(content: str) -> bytes:
    return b'{"messages": [{"role": "assistant"' + content.encode() + b"}, {}]}"


MULTIPART = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n\x00\xffRIFF\r\n--b--\r\n'
PASSED: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "not_a_number": (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', {}),
    "byte_order_mark": (COMPLETIONS, b'\xef\xbb\xbf{"prompt": "a"}', {}),
    "utf_16": (COMPLETIONS, '{"prompt": "a"}'.encode("utf-16"), {}),
    "lone_surrogate": (COMPLETIONS, b'{"prompt": "\\ud800"}', {}),
    "deep": (COMPLETIONS, b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
    "digits": (COMPLETIONS, b'{"a": NaN, "n": ' + b"9" * 5_000 + b"}", {}),
    "duplicates": (COMPLETIONS, b'{"prompt": "a", "prompt": "b", "model": 1e2, "model": "m"}', {}),
    "spelling": (COMPLETIONS, b' {"prompt":\t"\\u0061" , "t": 1.10, "n": 36893488147419103232}\n', {}),
    "forms": (COMPLETIONS, b'{"prompt": [[1,2],[ ]]}', {}),
    "mixed": (COMPLETIONS, b'{"prompt": [1,"a"]}', {}),
    "no_object": (COMPLETIONS, b"[1, 2]", {}),
    "foreign_type": (COMPLETIONS, b"prompt=zebra4711", {"content_type": "application/x-www-form-urlencoded"}),
    "empty_content": (CHAT, _chat(', "content": ""'), {}),
    "null_content": (CHAT, _chat(', "content": null'), {}),
    "list_content": (CHAT, _chat(', "content": []'), {}),
    "no_content": (CHAT, _chat(""), {}),
    "no_messages": (CHAT, b'{"messages": []}', {}),
    "gzip": (COMPLETIONS, gzip.compress(b'{"prompt": "a"}', mtime=0), {"content_encoding": "gzip"}),
    "gzip_inside_broken": (COMPLETIONS, gzip.compress(b"{", mtime=0), {"content_encoding": "gzip"}),
    "gzip_cut": (COMPLETIONS, gzip.compress(b'{"prompt": "a"}')[:-4], {"content_encoding": "gzip"}),
    "bomb": (COMPLETIONS, gzip.compress(b'{"a": "' + b"x" * (64 << 20)), {"content_encoding": "gzip"}),
    "brotli": (COMPLETIONS, b"\x8b\x02\x80zebra", {"content_encoding": "br"}),
    "not_gzip": (COMPLETIONS, b'{"prompt": "a"}', {"content_encoding": "gzip"}),
    "unknown_broken": ("/v1/unknown", b"{zebra", {}),
    "audio": ("/v1/audio/transcriptions", MULTIPART, {"content_type": "multipart/form-data; boundary=b"}),
    "embeddings": ("/v1/embeddings", b'{"input": ["a", "b"], "model": "m"}', {}),
    "rerank": ("/v1/rerank", b'{"query": "a", "documents": ["b"]}', {}),
}


@pytest.mark.parametrize("name", PASSED)
async def test_what_is_not_ours_to_refuse_arrives_byte_for_byte(site: Site, name: str) -> None:
    path, body, headers = PASSED[name]
    work(site.engine)
    status, _, answer = await site.ask(path, body, **headers)
    assert (status, answer) == (200, ANSWER)
    assert work(site.engine) == [body]


@pytest.mark.parametrize("body", [b'{"messages": []}', b'{"prompt": ""}'])
async def test_s_b09_the_engines_refusal_reaches_the_client_unchanged(site: Site, body: bytes) -> None:
    status, headers, answer = await site.ask("/refuse" + COMPLETIONS, body)
    assert (status, answer) == (400, REFUSAL)
    assert headers["x-upstream"] == "a"
    assert "x-llm-d-request-dropped-reason" not in headers


async def test_s_a02_s_a15_the_pickers_own_limit_holds_and_not_a_librarys(site: Site) -> None:
    """10 MB is more than gRPC takes by default; what is over 32 MiB is refused at once."""
    body = b'{"prompt": "' + b"z" * 10_000_000 + b'"}'
    work(site.engine)
    status, _, _ = await site.ask(COMPLETIONS, body)
    assert (status, work(site.engine)) == (200, [body])
    status, headers, answer = await site.ask(COMPLETIONS, bytes((32 << 20) + 1))
    assert (status, headers["x-llm-d-request-dropped-reason"]) == (413, "payload-too-large")
    assert "error" in json.loads(answer)
    assert work(site.engine) == []
