"""Rows 1 to 6 and 10 on real engines, with 4K prefixes: what is local, what is pulled, what must not be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import (
    Observation,
    expect_answered,
    expect_no_transfer,
    expect_pull,
    make_row,
)
from deploy.local.scenario.row import Check, Findings, Row
from deploy.local.scenario.texts import Message, assistant, chat, user
from deploy.local.vllm.accounts import ask
from deploy.local.vllm.scene import (
    ANSWER_TOKENS,
    DELTA_TOKENS,
    DOCUMENT_TOKENS,
    LOAD,
    LOAD_ANSWER_TOKENS,
    OWNER,
    QUEUE,
    Scene,
)
from sidecar import wire as sidecar_wire

SMALL_TOKENS: Final = 1024


@dataclass(slots=True)
class PlacementRows:
    """They leave each other what they need, in the order of `run`."""

    scene: Scene
    conversation: list[Message] = field(default_factory=list)

    async def run(self) -> tuple[list[Row], Check]:
        """Rows 1 to 6 and 10, and the source's own answer to row 3. Raises FleetError."""
        scene = self.scene
        rows = [await self._cold(), await self._local()]
        for document, tokens in (
            ("south", DOCUMENT_TOKENS),
            ("east", DOCUMENT_TOKENS),
            ("west", SMALL_TOKENS),
        ):
            await scene.own(scene.turn(document, "What is this?", tokens), f"own-{document}", tokens)
        rows.append(await self._restored())
        async with busy(scene.fleet, OWNER, waiting=QUEUE, answer_tokens=LOAD_ANSWER_TOKENS, more=LOAD):
            pulled, findings = await self._pulled()
            rows.append(await self._below_delta())
            await scene.fleet.set_thresholds(enabled=False, min_cached_token_delta=DELTA_TOKENS)
            rows.append(await self._switched_off())
            rows.append(await self._client_header())
        await scene.fleet.set_thresholds(enabled=True, min_cached_token_delta=DELTA_TOKENS)
        if scene.judge_ttft:
            share = pulled.answer.ttft_ms / scene.recompute_ttft_ms
            findings.between("TTFT against row 4", round(share, 3), 0.0, 1.0)
        expected = "another endpoint is chosen and pulls the prefix; TTFT below row 4"
        rows.append(scene.done(make_row(3, "owner busy", pulled, expected, findings)))
        return rows, await self._same_answer(pulled)

    async def _cold(self) -> Row:
        findings = Findings()
        first = self.scene.turn("north", "Who wrote the numbers down?")
        seen = await self.scene.own(first, "row-01", DOCUMENT_TOKENS)
        findings.equal("reason", seen.decision.reason, "no_holder")
        findings.equal("cached tokens", seen.computed.cached_tokens, 0)
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        self.conversation = [*first, assistant(seen.answer.text)]
        return self.scene.done(make_row(1, "cold prefix", seen, "nobody holds it: computed", findings))

    async def _local(self) -> Row:
        findings = Findings()
        messages = [*self.conversation, user("And who read them out?")]
        seen = await ask(self.scene.fleet, chat(messages, max_tokens=ANSWER_TOKENS), "row-02")
        findings.equal("destination", seen.decision.destination, OWNER)
        findings.equal("reason", seen.decision.reason, "local_best")
        findings.true(
            seen.computed.device_hit_tokens >= DOCUMENT_TOKENS,
            f"device hits are {seen.computed.device_hit_tokens} tokens, less than the document",
        )
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        return self.scene.done(make_row(2, "owner idle", seen, "local hit, no transfer", findings))

    async def _restored(self) -> Row:
        """Two other documents have pushed the first out of the owner's device cache."""
        findings = Findings()
        body = chat(self.scene.turn("north", "Which ship came last?"), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.scene.fleet, body, "row-06")
        findings.equal("destination", seen.decision.destination, OWNER)
        findings.equal("reason", seen.decision.reason, "local_best")
        restored = seen.computed.restored_tokens
        findings.true(restored > DOCUMENT_TOKENS // 2, f"only {restored} tokens were restored")
        findings.true(seen.computed.cached_tokens >= DOCUMENT_TOKENS, "the document was not held whole")
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        expected = f"{restored} tokens restored from the owner's own CPU tier, not pulled"
        return self.scene.done(make_row(6, "device tier evicted", seen, expected, findings))

    async def _pulled(self) -> tuple[Observation, Findings]:
        """Row 3; its verdict waits for row 4."""
        findings = Findings()
        body = chat(self.scene.turn("south", "How many containers were there?"), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.scene.fleet, body, "row-03")
        findings.one_of("destination", seen.decision.destination, self.scene.others)
        expect_pull(findings, seen, OWNER, self.scene.fleet.spec.kv_bytes_per_token)
        findings.true(seen.computed.pulled_tokens >= DOCUMENT_TOKENS, "less than the document was pulled")
        expect_answered(findings, seen)
        return seen, findings

    async def _below_delta(self) -> Row:
        findings = Findings()
        body = chat(self.scene.turn("west", "And this?", SMALL_TOKENS), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.scene.fleet, body, "row-05")
        findings.one_of("destination", seen.decision.destination, self.scene.others)
        findings.equal("reason", seen.decision.reason, "below_delta")
        findings.equal("cached tokens", seen.computed.cached_tokens, 0)
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        expected = f"the owner holds {SMALL_TOKENS} tokens more, the minimum is {DELTA_TOKENS}: no source"
        return self.scene.done(make_row(5, "gain below minimum", seen, expected, findings))

    async def _switched_off(self) -> Row:
        findings = Findings()
        body = chat(self.scene.turn("east", "How many containers are left?"), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.scene.fleet, body, "row-04")
        findings.one_of("destination", seen.decision.destination, self.scene.others)
        findings.equal("reason", seen.decision.reason, "switched_off")
        findings.equal("cached tokens", seen.computed.cached_tokens, 0)
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        self.scene.recompute_ttft_ms = seen.answer.ttft_ms
        expected = "a prefix that the owner holds is recomputed"
        return self.scene.done(make_row(4, "pulls switched off", seen, expected, findings))

    async def _client_header(self) -> Row:
        """Pulls are off, so only the client's own header could cause one; the lab listener keeps it."""
        findings = Findings()
        headers = {
            sidecar_wire.KV_CACHE_SOURCE_HOST_PORT: self.scene.fleet.engine_spec(OWNER).address.serving,
        }
        body = chat(self.scene.turn("north", "What is it about?"), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.scene.fleet, body, "row-10", client=self.scene.fleet.lab, headers=headers)
        findings.one_of("destination", seen.decision.destination, self.scene.others)
        findings.equal("reason", seen.decision.reason, "switched_off")
        findings.equal("pull reason of the engine", seen.computed.pull_reason, None)
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        expected = "x-kv-cache-source-host-port of a client is removed by the picker: nothing is pulled"
        return self.scene.done(make_row(10, "client names a source", seen, expected, findings))

    async def _same_answer(self, pulled: Observation) -> Check:
        """The source answers the same question from its own cache."""
        findings = Findings()
        body = chat(self.scene.turn("south", "How many containers were there?"), max_tokens=ANSWER_TOKENS)
        own = await self.scene.fleet.engine_client(OWNER).stream(
            "/v1/chat/completions", body, request_id="own-hit"
        )
        findings.true(own.cached_tokens >= DOCUMENT_TOKENS, f"its own hit has {own.cached_tokens} tokens")
        findings.equal("the answers are equal", own.text == pulled.answer.text, True)
        check = Check(
            title="the source's own hit",
            expected="answers as the engine that pulled the prefix did",
            seen=f"{own.cached_tokens} tokens cached at {OWNER}; equal: {own.text == pulled.answer.text}",
            problems=findings.as_tuple,
        )
        self.scene.report.check(check)
        return check
