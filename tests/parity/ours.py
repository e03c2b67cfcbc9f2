"""What the router says about a request: the engine's token ids, or why it has none."""

from __future__ import annotations

from pathlib import Path

from epp.core.errors import BadRequest
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import parse_request
from epp.request.tokenise import LocalTokeniser, Tokeniser
from tests.parity.corpus import Case

JSON_HEADERS = {"content-type": "application/json"}


def open_router_tokeniser(directory: Path) -> LocalTokeniser:
    """The router's tokeniser on the tokenizer files in `directory`, with time enough for a test."""
    return LocalTokeniser(LocalTokenizer.load(directory), budget_s=30.0)


async def router_says(tokeniser: Tokeniser, case: Case) -> list[int] | str:
    """The first prompt's token ids, or the reason why the request is routed by load."""
    try:
        request = parse_request(case.body, case.path, JSON_HEADERS)
    except BadRequest:
        return "bad_request"
    if request.prompt is None:
        return str(request.no_prompt)
    before = tokeniser.counters.outcomes.copy()
    ids = await tokeniser.token_ids(request.prompt)
    if ids is not None:
        return list(ids)
    return next(iter(tokeniser.counters.outcomes - before))
