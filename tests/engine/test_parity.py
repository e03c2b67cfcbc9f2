"""The router's token ids are those of a real vLLM, and the record of what it says is true.

`KVPULL_RECORD_PARITY=1 make test-engine` writes the record anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp
import pytest

from epp.request.render import RenderLimits, RenderTokeniser
from tests.parity import record
from tests.parity.corpus import MODEL, Case, cases
from tests.parity.families import FAMILIES
from tests.parity.ours import JSON_HEADERS, open_router_tokeniser, router_says


def engine_session() -> aiohttp.ClientSession:
    """A connection for each request: a server closes idle ones when it likes."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


async def engine_says(
    session: aiohttp.ClientSession, url: str, case: Case, *, may_fail: bool = False
) -> record.Answer:
    """The first prompt's token ids from the render endpoint of the request's own path. `may_fail`: a fault of
    the engine's is a refusal, too."""
    async with session.post(f"{url}{case.path}/render", data=case.body, headers=JSON_HEADERS) as response:
        answer = await response.json()
        if response.status != 200:
            refused = response.status in (400, 404, 501) or (may_fail and response.status == 500)
            assert refused, f"{case.key}: HTTP {response.status}"
            return record.REFUSED
    first = answer[0] if isinstance(answer, list) else answer
    ids: list[int] = first["token_ids"]
    return ids


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
async def test_every_request_of_the_corpus(
    family: str, renderers: dict[str, str], models: dict[str, Path]
) -> None:
    corpus = cases(family)
    tokeniser = open_router_tokeniser(models[family])
    async with engine_session() as session:
        engine = {case.key: await engine_says(session, renderers[family], case) for case in corpus}
    router = {case.key: await router_says(tokeniser, case) for case in corpus}
    await tokeniser.aclose()
    digest = record.digest_of(models[family], corpus)
    if os.environ.get("KVPULL_RECORD_PARITY"):
        record.write_record(family, digest, engine)

    found = record.compare(engine, router)
    assert (found.wrong, found.unexpected) == ([], [])
    assert len(found.same) >= 90
    assert record.read_record(family) == (digest, engine), "tests/data/parity is not what this vLLM says"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
async def test_every_request_of_the_corpus_by_the_render_back_end(
    family: str, renderers: dict[str, str], models: dict[str, Path]
) -> None:
    """What the picker asks the engine's render endpoint for is what the engine makes of the request."""
    corpus = cases(family)
    render = RenderTokeniser(lambda: (renderers[family],), limits=RenderLimits(budget_s=60.0), model=MODEL)
    router = {case.key: await router_says(render, case) for case in corpus}
    await render.aclose()
    _, engine = record.read_record(family)
    found = record.compare(engine, router)
    assert (found.wrong, found.unexpected) == ([], [])
    assert len(found.same) >= 90
    call = f"{family}/responses/call"  # by an endpoint of its own; some templates take no calls
    assert engine[call] == record.REFUSED or call in found.same
