"""Flags of the engine's server that change tokens: told of them, the router has the engine's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from epp.request.engine_flags import DEFAULT_FLAGS, EngineFlags
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.tokenise import LocalTokeniser
from tests.engine.conftest import render_servers
from tests.engine.test_parity import engine_says
from tests.parity import record
from tests.parity.corpus import Case, cases
from tests.parity.families import TEMPLATES
from tests.parity.ours import router_says

pytestmark = pytest.mark.timeout(900)
DEFAULTS = {"enable_thinking": False, "reasoning_effort": "high", "documents": [{"title": "t", "text": "x"}]}


@dataclass(frozen=True)
class Flagged:
    """A family behind a server with `words`, and what the router is told."""

    family: str
    words: tuple[str, ...]
    flags: EngineFlags = DEFAULT_FLAGS
    template: Path | None = None


TEMPLATE = TEMPLATES / "glm.jinja"
SERVED = {
    "defaults": Flagged(
        "chatml", ("--default-chat-template-kwargs", json.dumps(DEFAULTS)), EngineFlags(DEFAULTS)
    ),
    "documents": Flagged(
        "parts", ("--default-chat-template-kwargs", json.dumps(DEFAULTS)), EngineFlags(DEFAULTS)
    ),
    "string": Flagged(
        "parts", ("--chat-template-content-format", "string"), EngineFlags(content_format="string")
    ),
    "openai": Flagged(
        "chatml", ("--chat-template-content-format", "openai"), EngineFlags(content_format="openai")
    ),
    "tools": Flagged(
        "llama3", ("--exclude-tools-when-tool-choice-none",), EngineFlags(drops_unused_tools=True)
    ),
    "template": Flagged("llama3", ("--chat-template", str(TEMPLATE)), template=TEMPLATE),
}


@pytest.fixture(scope="module")
def flagged(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    served = {name: (models[one.family], one.words) for name, one in SERVED.items()}
    with render_servers(served, tmp_path_factory.mktemp("flags") / "log") as urls:
        yield urls


def forbidding(corpus: list[Case]) -> list[Case]:
    """Every request with tools once more, with the word that none of them may be called."""
    more = []
    for case in corpus:
        fields = json.loads(case.body)
        if fields.get("tools") and "tool_choice" not in fields and case.path != "/v1/completions":
            choice = {"type": "none"} if case.path == "/v1/messages" else "none"
            body = json.dumps(fields | {"tool_choice": choice}).encode()
            more.append(Case(case.family, case.name + "_forbidden", case.path, body))
    return more


@pytest.mark.parametrize("name", SERVED)
async def test_the_corpus_behind_a_server_with_the_flag(
    name: str, flagged: dict[str, str], models: dict[str, Path]
) -> None:
    served = SERVED[name]
    corpus = [case for case in cases(served.family) if not case.name.startswith("odd_")]
    corpus += forbidding(corpus)
    directory = models[served.family]
    told = LocalTokeniser(
        LocalTokenizer.load(directory, chat_template_path=served.template, flags=served.flags), budget_s=30.0
    )
    untold = LocalTokeniser(LocalTokenizer.load(directory), budget_s=30.0)
    async with aiohttp.ClientSession() as session:
        engine = {case.key: await engine_says(session, flagged[name], case) for case in corpus}
    found = record.compare(engine, {case.key: await router_says(told, case) for case in corpus})
    assert (found.wrong, found.unexpected) == ([], [])
    assert len(found.same) >= 50
    without = record.compare(engine, {case.key: await router_says(untold, case) for case in corpus})
    assert without.wrong, "the flag changes tokens: a router that is not told has others"
    for service in (told, untold):
        await service.aclose()
