"""What is decided on the spot, and what waits for a thread: the same decision either way."""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable
from typing import Any

import pytest

from epp.core.errors import BadRequest
from epp.extproc.events import Headers, RequestHead, Routing
from tests.unit.director.rig import BASE, Rig

SHORT = {"model": BASE, "prompt": "The cat sat on the mat."}
LONG = {"model": BASE, "prompt": "The cat sat on the mat. " * 500}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "Hello"}]}


def decide(
    rig: Rig, body: bytes, path: str = "/v1/completions", **headers: str
) -> Routing | Awaitable[Routing]:
    fields = ((name.replace("_", "-"), value) for name, value in headers.items())
    head = RequestHead(Headers.of(("content-type", "application/json"), *fields), "POST", path, "r")
    return rig.director.decide(head, body)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (SHORT, "/v1/completions"),
        (CHAT, "/v1/chat/completions"),
        ({"prompt": list(range(3000))}, "/v1/completions"),
        (LONG, "/v1/embeddings"),
    ],
)
async def test_a_short_request_or_one_without_text_waits_for_nothing(
    fields: dict[str, Any], path: str
) -> None:
    rig = Rig()
    assert isinstance(decide(rig, json.dumps(fields).encode(), path), Routing)
    assert len(rig.requests) == 1


@pytest.mark.parametrize("encoding", [None, "gzip"])
async def test_a_long_text_waits_for_a_thread_whatever_its_body_takes(encoding: str | None) -> None:
    rig = Rig()
    body = json.dumps(LONG).encode()
    headers = {} if encoding is None else {"content_encoding": encoding}
    routing = decide(rig, body if encoding is None else gzip.compress(body), **headers)
    assert not isinstance(routing, Routing)
    await routing
    assert rig.requests[0].prompt_tokens > 2000


async def test_the_tokens_are_the_same_either_way() -> None:
    rig = Rig()
    decide(rig, json.dumps(SHORT).encode())
    spaces = b" " * 4096  # no change of the prompt, but no short body any more
    routing = decide(rig, json.dumps(SHORT).encode() + spaces)
    assert not isinstance(routing, Routing)
    await routing
    first, second = (list(request.token_ids or ()) for request in rig.requests)
    assert first == second
    assert first


class Panic(BaseException):
    """As the tokenizer's binding raises it: no `Exception`."""


@pytest.mark.parametrize("fault", [ValueError, Panic])
async def test_a_fault_of_the_tokenizer_costs_the_match_only(
    fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()

    def fail(*_: object) -> None:
        raise fault("a prompt")

    monkeypatch.setattr(rig.tokeniser, "_steps", fail)
    assert isinstance(decide(rig, json.dumps(SHORT).encode()), Routing)
    assert rig.requests[0].token_ids is None
    assert rig.tokeniser.counters.outcomes["failed"] == 1


async def test_a_refusal_on_the_spot_is_counted() -> None:
    rig = Rig()
    with pytest.raises(BadRequest):
        decide(rig, b"{")
    assert rig.value('llm_d_epp_request_error_total{error_code="bad-request"}') == 1
