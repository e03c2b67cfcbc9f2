"""The rows of the scenario that real engines can show, with 4K prefixes.

Rows that need a fault inside an engine (a replay held back, a source stopped in mid pull) are shown by the
emulated fleet and by the tests of the real engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from deploy.local.envoy import LAB_SUBSET_HEADER
from deploy.local.fleet import Fleet
from deploy.local.report import Reporter
from deploy.local.scenario.load import busy
from deploy.local.scenario.observe import (
    Observation,
    expect_answered,
    expect_no_transfer,
    expect_pull,
    make_row,
)
from deploy.local.scenario.row import Check, Findings, Row
from deploy.local.scenario.run import Result
from deploy.local.scenario.texts import Message, Texts, assistant, chat, question, user
from deploy.local.vllm.accounts import ask, wait_up
from deploy.local.waiting import until
from sidecar import wire as sidecar_wire

OWNER: Final = "engine-a"
DOCUMENT_TOKENS: Final = 4096
SMALL_TOKENS: Final = 1024
DELTA_TOKENS: Final = 2048
ANSWER_TOKENS: Final = 8
ROWS: Final = (1, 2, 3, 4, 5, 6, 10)
_QUEUE: Final = 2
_LOAD_ANSWER_TOKENS: Final = 4096
_SETTLE_S: Final = 60.0


@dataclass(slots=True)
class Rows:
    """One run. `judge_ttft` False: no verdict rests on time."""

    fleet: Fleet
    report: Reporter
    judge_ttft: bool
    texts: Texts = field(init=False)
    conversation: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts = Texts(self.fleet.spec.tokenizer)

    @property
    def others(self) -> tuple[str, ...]:
        """The pods besides the owner."""
        return tuple(pod for pod in self.fleet.spec.pods if pod != OWNER)

    def turn(self, document: str, text: str, tokens: int = DOCUMENT_TOKENS) -> list[Message]:
        return [question(self.texts.document(document, tokens), text)]

    async def run(self) -> Result:
        """All rows on a fleet that has just started. Raises FleetError as `run_scenario`."""
        await wait_up(self.fleet)
        rows = [await self._cold(), await self._local()]
        for document, tokens in (
            ("south", DOCUMENT_TOKENS),
            ("east", DOCUMENT_TOKENS),
            ("west", SMALL_TOKENS),
        ):
            await self._own(self.turn(document, "What is this?", tokens), f"own-{document}", tokens)
        rows.append(await self._restored())
        async with busy(
            self.fleet, OWNER, waiting=_QUEUE, answer_tokens=_LOAD_ANSWER_TOKENS, more={"ignore_eos": True}
        ):
            pulled, findings = await self._pulled()
            rows.append(await self._below_delta())
            await self.fleet.set_thresholds(enabled=False, min_cached_token_delta=DELTA_TOKENS)
            recomputed = await self._switched_off()
            rows.append(recomputed)
            rows.append(await self._client_header())
        if self.judge_ttft:
            share = pulled.answer.ttft_ms / recomputed.ttft_ms
            findings.between("TTFT against row 4", round(share, 3), 0.0, 1.0)
        expected = "another endpoint is chosen and pulls the prefix; TTFT below row 4"
        rows.append(self._done(make_row(3, "owner busy", pulled, expected, findings)))
        checks = (await self._same_answer(pulled),)
        return Result(tuple(sorted(rows, key=lambda row: row.number)), checks, ROWS)

    def _done(self, row: Row) -> Row:
        self.report.row(row)
        return row

    async def _own(self, messages: list[Message], name: str, tokens: int) -> Observation:
        """Have the owner compute it, and the picker hear of it."""
        before = (await self.fleet.picker.endpoints())[OWNER].blocks_cpu
        headers = {LAB_SUBSET_HEADER: self.fleet.engine_spec(OWNER).address.serving}
        body = chat(messages, max_tokens=ANSWER_TOKENS)
        seen = await ask(self.fleet, body, name, client=self.fleet.lab, headers=headers)
        blocks = before + tokens // self.fleet.spec.block_size
        await until(
            f"the picker knows of {blocks} blocks in the CPU tier of {OWNER}",
            self.fleet.picker.endpoints,
            lambda rows: rows[OWNER].blocks_cpu >= blocks,
            timeout_s=_SETTLE_S,
        )
        return seen

    async def _cold(self) -> Row:
        findings = Findings()
        first = self.turn("north", "Who wrote the numbers down?")
        seen = await self._own(first, "row-01", DOCUMENT_TOKENS)
        findings.equal("reason", seen.decision.reason, "no_holder")
        findings.equal("cached tokens", seen.computed.cached_tokens, 0)
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        self.conversation = [*first, assistant(seen.answer.text)]
        return self._done(make_row(1, "cold prefix", seen, "nobody holds it: computed", findings))

    async def _local(self) -> Row:
        findings = Findings()
        messages = [*self.conversation, user("And who read them out?")]
        seen = await ask(self.fleet, chat(messages, max_tokens=ANSWER_TOKENS), "row-02")
        findings.equal("destination", seen.decision.destination, OWNER)
        findings.equal("reason", seen.decision.reason, "local_best")
        findings.true(
            seen.computed.device_hit_tokens >= DOCUMENT_TOKENS,
            f"device hits are {seen.computed.device_hit_tokens} tokens, less than the document",
        )
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        return self._done(make_row(2, "owner idle", seen, "local hit, no transfer", findings))

    async def _restored(self) -> Row:
        """Two other documents have pushed the first out of the owner's device cache."""
        findings = Findings()
        body = chat(self.turn("north", "Which ship came last?"), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.fleet, body, "row-06")
        findings.equal("destination", seen.decision.destination, OWNER)
        findings.equal("reason", seen.decision.reason, "local_best")
        restored = seen.computed.restored_tokens
        findings.true(restored > DOCUMENT_TOKENS // 2, f"only {restored} tokens were restored")
        findings.true(seen.computed.cached_tokens >= DOCUMENT_TOKENS, "the document was not held whole")
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        expected = f"{restored} tokens restored from the owner's own CPU tier, not pulled"
        return self._done(make_row(6, "device tier evicted", seen, expected, findings))

    async def _pulled(self) -> tuple[Observation, Findings]:
        """Row 3; its verdict waits for row 4."""
        findings = Findings()
        body = chat(self.turn("south", "How many containers were there?"), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.fleet, body, "row-03")
        findings.one_of("destination", seen.decision.destination, self.others)
        expect_pull(findings, seen, OWNER, self.fleet.spec.kv_bytes_per_token)
        findings.true(seen.computed.pulled_tokens >= DOCUMENT_TOKENS, "less than the document was pulled")
        expect_answered(findings, seen)
        return seen, findings

    async def _below_delta(self) -> Row:
        findings = Findings()
        body = chat(self.turn("west", "And this?", SMALL_TOKENS), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.fleet, body, "row-05")
        findings.one_of("destination", seen.decision.destination, self.others)
        findings.equal("reason", seen.decision.reason, "below_delta")
        findings.equal("cached tokens", seen.computed.cached_tokens, 0)
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        expected = f"the owner holds {SMALL_TOKENS} tokens more, the minimum is {DELTA_TOKENS}: no source"
        return self._done(make_row(5, "gain below minimum", seen, expected, findings))

    async def _switched_off(self) -> Row:
        findings = Findings()
        body = chat(self.turn("east", "How many containers are left?"), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.fleet, body, "row-04")
        findings.one_of("destination", seen.decision.destination, self.others)
        findings.equal("reason", seen.decision.reason, "switched_off")
        findings.equal("cached tokens", seen.computed.cached_tokens, 0)
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        expected = "a prefix that the owner holds is recomputed"
        return self._done(make_row(4, "pulls switched off", seen, expected, findings))

    async def _client_header(self) -> Row:
        """Pulls are off, so only the client's own header could cause one; the lab listener keeps it."""
        findings = Findings()
        headers = {
            sidecar_wire.KV_CACHE_SOURCE_HOST_PORT: self.fleet.engine_spec(OWNER).address.serving,
        }
        body = chat(self.turn("north", "What is it about?"), max_tokens=ANSWER_TOKENS)
        seen = await ask(self.fleet, body, "row-10", client=self.fleet.lab, headers=headers)
        findings.one_of("destination", seen.decision.destination, self.others)
        findings.equal("reason", seen.decision.reason, "switched_off")
        findings.equal("pull reason of the engine", seen.computed.pull_reason, None)
        expect_no_transfer(findings, seen)
        expect_answered(findings, seen)
        expected = "x-kv-cache-source-host-port of a client is removed by the picker: nothing is pulled"
        return self._done(make_row(10, "client names a source", seen, expected, findings))

    async def _same_answer(self, pulled: Observation) -> Check:
        """The source answers the same question from its own cache."""
        findings = Findings()
        body = chat(self.turn("south", "How many containers were there?"), max_tokens=ANSWER_TOKENS)
        own = await self.fleet.engine_client(OWNER).stream("/v1/chat/completions", body, request_id="own-hit")
        findings.true(own.cached_tokens >= DOCUMENT_TOKENS, f"its own hit has {own.cached_tokens} tokens")
        findings.equal("the answers are equal", own.text == pulled.answer.text, True)
        check = Check(
            title="the source's own hit",
            expected="answers as the engine that pulled the prefix did",
            seen=f"{own.cached_tokens} tokens cached at {OWNER}; equal: {own.text == pulled.answer.text}",
            problems=findings.as_tuple,
        )
        self.report.check(check)
        return check
