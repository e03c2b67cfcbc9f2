"""S-H01: marks in prompt, salt, tools and error paths appear in no log, metric, error or record."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import asdict
from typing import Any

import pytest

from epp.core.errors import PickerError
from epp.core.types import Outcome
from tests.unit.director.rig import BASE, Rig

MARK = "zebra4711"
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"]

MARKED: list[dict[str, Any]] = [
    {"prompt": MARK, "cache_salt": MARK},
    {"prompt": [MARK, 5], "cache_salt": MARK},
    {"messages": [{"role": "user", "content": MARK}], "tools": [{"function": {"name": MARK}}]},
    {"messages": [{"role": MARK, "content": MARK}], "tools": [{"function": {"name": MARK}}]},
    {"messages": [{"role": "user", "content": [{"type": MARK, "text": MARK}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": MARK}}]}]},
    {"messages": [{"role": "user", "content": MARK}], "chat_template_kwargs": {MARK: MARK}},
    {"messages": [{"role": "user", "content": "\ud800" + MARK}]},
    {"input": MARK, "instructions": MARK, "max_tokens": MARK},
    {"input": [{"type": MARK, "role": MARK, "content": MARK}]},
    {"system": [{"type": "text", "text": MARK}], "messages": [{"role": "user", "content": MARK}]},
    {"system": MARK, "messages": [{"role": "user", "content": [{"type": MARK}]}]},
    {"token_ids": [MARK], "cache_salt": MARK},
    {"token_ids": [5, 6], "cache_salt": [MARK]},
]
BODIES = [json.dumps({"model": BASE} | fields).encode() for fields in MARKED]
BROKEN = [
    b'{"prompt": "' + MARK.encode(),
    MARK.encode(),
    b'{"model": "m", "prompt": "' + MARK.encode() + b'"} ' + MARK.encode(),
    b'{"' + MARK.encode() + b'": \xff}',
    b'{"a": ' + b"[" * 5000 + MARK.encode(),
    gzip.compress(MARK.encode()),
]


async def ask(rig: Rig, body: bytes, path: str, *, encoded: bool = False) -> str:
    """Route it, let it end, and return everything that can be seen of it."""
    seen = []
    headers = (("authorization", f"Bearer {MARK}"), *((("content-encoding", "gzip"),) if encoded else ()))
    try:
        routing = await rig.route({}, path, body=body, headers=headers)
    except PickerError as error:
        seen += [str(error), repr(error), repr(error.__cause__), error.reason]
    else:
        rig.director.first_token(routing.token)
        rig.director.finished(routing.token, Outcome(status=200, completed=True))
        seen += [repr(routing.set_headers), repr(routing.token), routing.destination]
        record = rig.pool.picker.find_decision(rig.requests[-1].request_id)
        assert record is not None
        seen.append(repr(asdict(record)))
    return "\n".join(seen)


@pytest.mark.parametrize("path", PATHS)
async def test_s_h01_marks_are_never_shown(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig = Rig()
    seen = [await ask(rig, body, path) for body in BODIES + BROKEN]
    seen += [await ask(rig, gzip.compress(body), path, encoded=True) for body in BODIES + BROKEN]
    seen += [rig.metrics_page(), caplog.text, repr([record.args for record in caplog.records])]
    await rig.tokeniser.aclose()
    assert "request" in caplog.text  # there was something to look at
    assert MARK not in "\n".join(seen)
    assert MARK.encode() in b"".join(BODIES)


async def test_adapter_names_of_clients_are_no_labels() -> None:
    rig = Rig()
    await rig.route({"model": MARK, "prompt": "a"})
    assert MARK not in rig.metrics_page()
