"""What the router says of a served request is what the engine's own events say of its cache.

Each request is served by a real vLLM; the blocks that its events store, through the real intake and
index, are exactly the whole blocks of the router's tokens for that request: no block less, none more.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from epp.request.tokenise import LocalTokeniser
from tests.engine.serving import ADAPTER, BLOCK_TOKENS, Engine, watching
from tests.parity.corpus import Case, cases
from tests.parity.ours import JSON_HEADERS, router_says

pytestmark = pytest.mark.timeout(900)
FAMILY = "llama3"
LENGTH_FIELDS = {"/v1/responses": "max_output_tokens"}


def bounded(case: Case) -> dict[str, Any]:
    """The request with the shortest answer; nothing that its prompt depends on is changed."""
    fields: dict[str, Any] = json.loads(case.body)
    return fields | {LENGTH_FIELDS.get(case.path, "max_tokens"): 1, "temperature": 0.0}


async def serve(engine: Engine, path: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """The answer, or None when the engine refuses the request."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(engine.url + path, data=json.dumps(fields), headers=JSON_HEADERS) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status < 500, answer
        return answer if response.status == 200 else None


async def clear_cache(engine: Engine) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/reset_prefix_cache") as response,
    ):
        assert response.status == 200


def prompt_tokens(answer: dict[str, Any]) -> int | None:
    usage = answer.get("usage") or {}
    return usage.get("prompt_tokens", usage.get("input_tokens"))


def fresh(number: int, blocks: int) -> list[int]:
    """A prompt that no other test sends."""
    return [20 + (number * 7919 + position * 31) % 8000 for position in range(blocks * BLOCK_TOKENS + 5)]


async def test_every_served_request_is_claimed_to_its_last_whole_block(
    engine: Engine, router: LocalTokeniser
) -> None:
    compared, shapes = 0, set()
    async with watching(engine) as view:
        for case in cases(FAMILY):
            ids = await router_says(router, case)
            if not isinstance(ids, list) or len(ids) < BLOCK_TOKENS:
                continue
            answer = await serve(engine, case.path, bounded(case))
            if answer is None:
                continue
            whole = len(ids) // BLOCK_TOKENS
            await view.until(lambda ids=ids, whole=whole: view.depth(ids) == whole)
            assert view.depth([*ids[: whole * BLOCK_TOKENS], *([7] * BLOCK_TOKENS)]) == whole, case.key
            assert view.depth([ids[0] ^ 1, *ids[1:]]) == 0, case.key
            if prompt_tokens(answer) is not None:
                assert prompt_tokens(answer) == len(ids), case.key
            compared += 1
            shapes.add(case.path)
    assert compared >= 60
    assert len(shapes) == 4


async def test_token_in_and_a_late_router(engine: Engine) -> None:
    """The token-in API has no render endpoint; a router that comes later learns the same by replay."""
    ids = fresh(1, blocks=3)
    answer = await serve(
        engine,
        "/inference/v1/generate",
        {"model": "m", "token_ids": ids, "sampling_params": {"max_tokens": 1}},
    )
    assert answer is not None
    async with watching(engine) as view:
        await view.until(lambda: view.depth(ids) == 3)
        assert view.depth(fresh(2, blocks=3)) == 0


async def test_a_salt_matches_only_itself(engine: Engine) -> None:
    ids, other = fresh(3, blocks=4), fresh(4, blocks=4)
    async with watching(engine) as view:
        salted = {"model": "m", "prompt": ids, "max_tokens": 1, "cache_salt": "tenant-a"}
        assert await serve(engine, "/v1/completions", salted) is not None
        assert (
            await serve(engine, "/v1/completions", {"model": "m", "prompt": other, "max_tokens": 1})
            is not None
        )
        await view.until(lambda: view.depth(ids, salt="tenant-a") == 4 and view.depth(other) == 4)
        assert view.depth(ids) == 0
        assert view.depth(ids, salt="tenant-b") == 0
        assert view.depth(other, salt="tenant-a") == 0


async def test_an_adapter_matches_only_itself(engine: Engine) -> None:
    ids = fresh(5, blocks=4)
    async with watching(engine) as view:
        assert (
            await serve(engine, "/v1/completions", {"model": ADAPTER, "prompt": ids, "max_tokens": 1})
            is not None
        )
        await view.until(lambda: view.depth(ids, lora=ADAPTER) == 4)
        assert view.depth(ids) == 0
        assert view.depth(ids, lora="another") == 0
        assert view.depth(ids, lora=ADAPTER, salt="tenant-a") == 0


async def test_a_cleared_cache_has_no_claim(engine: Engine) -> None:
    """vLLM says so with its next step: an idle engine's cleared cache is claimed until a request comes."""
    ids, later = fresh(6, blocks=2), fresh(7, blocks=2)
    async with watching(engine) as view:
        assert (
            await serve(engine, "/v1/completions", {"model": "m", "prompt": ids, "max_tokens": 1}) is not None
        )
        await view.until(lambda: view.depth(ids) == 2)
        await clear_cache(engine)
        assert (
            await serve(engine, "/v1/completions", {"model": "m", "prompt": later, "max_tokens": 1})
            is not None
        )
        await view.until(lambda: view.depth(later) == 2)
        assert view.depth(ids) == 0
