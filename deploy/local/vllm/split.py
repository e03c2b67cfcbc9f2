"""Rows 11 and 12 on real engines: prefill and decode on different endpoints, a later turn of a session.

Prompts are token ids: a random model's text does not read back as the tokens it was made of, and the history
has to be found again by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.local.client import COMPLETIONS
from deploy.local.scenario.disagg import (
    PD_CONFIG,
    ROLES,
    expect_bytes,
    expect_history_pulled,
    expect_split,
)
from deploy.local.scenario.observe import Observation, decision_of, expect_answered, make_row
from deploy.local.scenario.row import Findings, Row
from deploy.local.vllm.accounts import ask
from deploy.local.vllm.scene import ANSWER_TOKENS, Scene

_PROMPT_TOKENS: Final = 1024
_HISTORY_TOKENS: Final = 416  # generated in the first turn
_DELTA_TOKENS: Final = 256  # below that


@dataclass(frozen=True, slots=True)
class _Session:
    """A conversation after its first turn."""

    tokens: tuple[int, ...]
    decoder: str


async def later_turns(scene: Scene) -> list[Row]:
    """Rows 11 and 12, each on a session of its own; the picker is restarted for them."""
    fleet = scene.fleet
    scene.report.progress("restarting the picker for prefill/decode disaggregation")
    await fleet.stop_picker()
    roles = {pod: role for pod, role in ROLES.items() if pod in fleet.spec.pods}
    await fleet.start_picker(PD_CONFIG, roles)
    await fleet.wait_live(fleet.spec.pods)
    await fleet.set_thresholds(enabled=False, min_cached_token_delta=_DELTA_TOKENS)
    first, second = await _open_session(scene, "one"), await _open_session(scene, "two")
    without = await _recomputed_history(scene, first)
    await fleet.set_thresholds(enabled=True, min_cached_token_delta=_DELTA_TOKENS)
    return [without, await _pulled_history(scene, second)]


async def _open_session(scene: Scene, name: str) -> _Session:
    """The first turn: a prompt, and an answer long enough to be worth pulling."""
    prompt = scene.texts.tokens(f"session {name}", _PROMPT_TOKENS)
    request_id = f"session-{name}"
    before = await scene.fleet.picker.endpoints()
    answer = await scene.fleet.gateway.stream(
        COMPLETIONS, _body(prompt, _HISTORY_TOKENS), request_id=request_id
    )
    decoder = (await decision_of(scene.fleet, request_id)).destination
    blocks = (_PROMPT_TOKENS + _HISTORY_TOKENS) // scene.block_size - 1
    await scene.until_known(decoder, before[decoder].blocks_cpu + blocks)
    return _Session((*prompt, *answer.token_ids), decoder)


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def _next_turn(scene: Scene, session: _Session, request_id: str) -> Observation:
    question = scene.texts.tokens("Who was there?", 2 * scene.block_size + 5)
    body = _body((*session.tokens, *question), ANSWER_TOKENS)
    return await ask(scene.fleet, body, request_id, path=COMPLETIONS)


async def _recomputed_history(scene: Scene, session: _Session) -> Row:
    """Row 11."""
    findings = Findings()
    seen = await _next_turn(scene, session, "row-11")
    expect_split(findings, seen, session.decoder)
    findings.equal("reason", seen.decision.reason, "switched_off")
    findings.equal("source", seen.decision.source, None)
    findings.equal("pulled tokens", seen.computed.pulled_tokens, 0)
    findings.true(
        seen.computed.computed_tokens >= _HISTORY_TOKENS,
        f"the prefill endpoint computed {seen.computed.computed_tokens} tokens, less than the history",
    )
    _expect_whole(findings, seen, scene)
    expected = "P/D without pulls: the prefill endpoint recomputes the generated history"
    return scene.done(make_row(11, "P/D later turn, no pulls", seen, expected, findings))


async def _pulled_history(scene: Scene, session: _Session) -> Row:
    """Row 12."""
    findings = Findings()
    seen = await _next_turn(scene, session, "row-12")
    expect_history_pulled(
        findings, seen, session.decoder, _HISTORY_TOKENS - 2 * scene.block_size, _HISTORY_TOKENS // 2
    )
    _expect_whole(findings, seen, scene)
    expected = "P/D with pulls: the decoder's generated history is pulled, only the question is computed"
    return scene.done(make_row(12, "P/D later turn, pulls", seen, expected, findings))


def _expect_whole(findings: Findings, seen: Observation, scene: Scene) -> None:
    expect_answered(findings, seen)
    expect_bytes(findings, seen, scene.fleet.spec.kv_bytes_per_token)
