"""Rows 11 and 12: prefill and decode on different endpoints, a later turn of a session.

The history that a decoder generated is in that decoder's cache only. Without pulls the prefill
endpoint computes it again; with pulls it fetches it, computes the new part, and hands over as usual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deploy.local.client import CHAT
from deploy.local.scenario.observe import (
    Observation,
    ask,
    decision_of,
    expect_answered,
    make_row,
)
from deploy.local.scenario.row import Findings, Row
from deploy.local.scenario.texts import Message, assistant, chat, question, user
from deploy.local.scenario.world import ANSWER_TOKENS, World
from deploy.local.spec import ROOT

PD_CONFIG = ROOT / "config" / "epp" / "pd.yaml"
PREFILLER = "engine-a"
ROLES: Mapping[str, str] = MappingProxyType(
    {PREFILLER: "prefill", "engine-b": "decode", "engine-c": "decode"}
)
_PROMPT_TOKENS = 2_048
_HISTORY_TOKENS = 400
_DELTA_TOKENS = 256  # below what a first turn generates


@dataclass(frozen=True, slots=True)
class _Session:
    """A conversation after its first turn."""

    messages: list[Message]
    decoder: str

    def next_turn(self, text: str) -> dict[str, Any]:
        return chat([*self.messages, user(text)], max_tokens=ANSWER_TOKENS)


async def switch_picker(world: World) -> None:
    """Restart the picker with the disaggregated configuration; the endpoints get roles."""
    world.report.progress("restarting the picker for prefill/decode disaggregation")
    await world.fleet.stop_picker()
    await world.fleet.start_picker(PD_CONFIG, ROLES)
    await world.fleet.wait_live(world.fleet.spec.pods)


async def later_turns(world: World) -> list[Row]:
    """Rows 11 and 12, each on a session of its own; both first turns run at once."""
    await world.fleet.set_thresholds(enabled=False, min_cached_token_delta=_DELTA_TOKENS)
    first, second = await asyncio.gather(_open_session(world, "one"), _open_session(world, "two"))
    without = await _recomputed_history(world, first)
    await world.fleet.set_thresholds(enabled=True, min_cached_token_delta=_DELTA_TOKENS)
    return [without, await _pulled_history(world, second)]


async def _open_session(world: World, name: str) -> _Session:
    """The first turn: a prompt, and an answer long enough to be worth pulling."""
    first = question(world.texts.document(f"session {name}", _PROMPT_TOKENS), "Tell me all of it.")
    request_id = f"session-{name}"
    answer = await world.fleet.gateway.stream(
        CHAT, chat([first], max_tokens=_HISTORY_TOKENS), request_id=request_id
    )
    decision = await decision_of(world.fleet, request_id)
    await world.until_known(decision.destination, _PROMPT_TOKENS + _HISTORY_TOKENS - world.block_size)
    return _Session([first, assistant(answer.text)], decision.destination)


async def _recomputed_history(world: World, session: _Session) -> Row:
    """Row 11."""
    findings = Findings()
    seen = await ask(world.fleet, session.next_turn("Who was there?"), "row-11")
    expect_split(findings, seen, session.decoder)
    findings.equal("reason", seen.decision.reason, "switched_off")
    findings.equal("source", seen.decision.source, None)
    findings.equal("pulled tokens", seen.computed.pulled_tokens, 0)
    findings.true(
        seen.computed.computed_tokens >= _HISTORY_TOKENS,
        f"the prefill endpoint computed {seen.computed.computed_tokens} tokens, less than the history",
    )
    expect_bytes(findings, seen, world.fleet.spec.kv_bytes_per_token)
    expected = "P/D without pulls: the prefill endpoint recomputes the generated history"
    return world.finish(make_row(11, "P/D later turn, no pulls", seen, expected, findings))


async def _pulled_history(world: World, session: _Session) -> Row:
    """Row 12."""
    findings = Findings()
    seen = await ask(world.fleet, session.next_turn("Who was there?"), "row-12")
    expect_history_pulled(
        findings, seen, session.decoder, _HISTORY_TOKENS - 2 * world.block_size, _HISTORY_TOKENS // 2
    )
    expect_bytes(findings, seen, world.fleet.spec.kv_bytes_per_token)
    expected = "P/D with pulls: the decoder's generated history is pulled, only the question is computed"
    return world.finish(make_row(12, "P/D later turn, pulls", seen, expected, findings))


def expect_history_pulled(
    findings: Findings, seen: Observation, decoder: str, at_least: int, computed_below: int
) -> None:
    """The decoder is the source of `at_least` tokens, and fewer than `computed_below` were computed."""
    expect_split(findings, seen, decoder)
    findings.equal("reason", seen.decision.reason, "pull")
    findings.equal("source", seen.decision.source, decoder)
    findings.equal("pulled tokens", seen.computed.pulled_tokens, seen.decision.gain_tokens)
    findings.true(
        seen.computed.pulled_tokens >= at_least,
        f"{seen.computed.pulled_tokens} tokens were pulled, less than the generated history",
    )
    findings.true(
        seen.computed.computed_tokens < computed_below,
        f"the prefill endpoint still computed {seen.computed.computed_tokens} tokens",
    )


def expect_split(findings: Findings, seen: Observation, decoder: str) -> None:
    """Prefilled on the prefill endpoint, decoded where the session is."""
    findings.equal("prefill endpoint", seen.decision.prefill, PREFILLER)
    findings.equal("destination", seen.decision.destination, decoder)
    findings.true(seen.decoded.handed_over_tokens > 0, "nothing was handed over to the decoder")
    expect_answered(findings, seen)


def expect_bytes(findings: Findings, seen: Observation, per_token: int) -> None:
    """Both legs, at both ends: source to prefill endpoint, prefill endpoint to decoder."""
    pulled_bytes = seen.computed.pulled_tokens * per_token
    handed_bytes = seen.decoded.handed_over_tokens * per_token
    decoder = seen.decision.destination
    findings.equal("bytes received by the prefill endpoint", seen.moved.received[PREFILLER], pulled_bytes)
    findings.equal("bytes served by the decoder", seen.moved.served[decoder], pulled_bytes)
    findings.equal("bytes received by the decoder", seen.moved.received[decoder], handed_bytes)
    findings.equal("bytes served by the prefill endpoint", seen.moved.served[PREFILLER], handed_bytes)
