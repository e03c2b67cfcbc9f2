"""What the rows on real engines share: the fleet, the texts, and how an endpoint comes to hold a prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from deploy.local.client import CHAT, COMPLETIONS, Answer
from deploy.local.envoy import LAB_SUBSET_HEADER
from deploy.local.fleet import Fleet
from deploy.local.report import Reporter
from deploy.local.scenario.observe import Observation
from deploy.local.scenario.row import Row
from deploy.local.scenario.texts import Message, Texts, chat, question
from deploy.local.vllm.accounts import ask
from deploy.local.waiting import until

OWNER: Final = "engine-a"
DOCUMENT_TOKENS: Final = 4096
DELTA_TOKENS: Final = 2048
ANSWER_TOKENS: Final = 8
LOAD: Final = {"ignore_eos": True}
LOAD_ANSWER_TOKENS: Final = 4096
QUEUE: Final = 2
SETTLE_S: Final = 60.0


@dataclass(slots=True)
class Scene:
    """State of one run. `judge_ttft` False: no verdict rests on time."""

    fleet: Fleet
    report: Reporter
    judge_ttft: bool
    texts: Texts = field(init=False)
    recompute_ttft_ms: float = 0.0  # row 4: the yardstick of TTFT verdicts

    def __post_init__(self) -> None:
        self.texts = Texts(self.fleet.spec.tokenizer)

    @property
    def others(self) -> tuple[str, ...]:
        """The pods besides the owner."""
        return tuple(pod for pod in self.fleet.spec.pods if pod != OWNER)

    @property
    def block_size(self) -> int:
        return self.fleet.spec.block_size

    def turn(self, document: str, text: str, tokens: int = DOCUMENT_TOKENS) -> list[Message]:
        """A one-turn question about a document."""
        return [question(self.texts.document(document, tokens), text)]

    def body(self, document: str, text: str, tokens: int = DOCUMENT_TOKENS) -> dict[str, Any]:
        return chat(self.turn(document, text, tokens), max_tokens=ANSWER_TOKENS)

    def done(self, row: Row) -> Row:
        self.report.row(row)
        return row

    def steer(self, pod: str) -> dict[str, str]:
        """The lab listener's hint that makes `pod` the destination."""
        return {LAB_SUBSET_HEADER: self.fleet.engine_spec(pod).address.serving}

    async def own(self, messages: list[Message], name: str, tokens: int) -> Observation:
        """Have the owner compute it, and the picker hear of it."""
        before = (await self.fleet.picker.endpoints())[OWNER].blocks_cpu
        body = chat(messages, max_tokens=ANSWER_TOKENS)
        seen = await ask(self.fleet, body, name, client=self.fleet.lab, headers=self.steer(OWNER))
        await self.until_known(OWNER, before + tokens // self.block_size)
        return seen

    async def hold(self, pod: str, body: dict[str, Any], name: str, tokens: int) -> Answer:
        """As `own`, of any pod, asked on its own port: whatever the picker would say."""
        before = (await self.fleet.picker.endpoints())[pod].blocks_cpu
        answer = await self.fleet.engine_client(pod).stream(CHAT, body, request_id=name)
        await self.until_known(pod, before + tokens // self.block_size)
        return answer

    async def until_known(self, pod: str, blocks: int) -> None:
        """Until the picker has heard that `pod` holds at least so many blocks in its CPU tier."""
        await until(
            f"the picker knows of {blocks} blocks in the CPU tier of {pod}",
            self.fleet.picker.endpoints,
            lambda rows: rows[pod].blocks_cpu >= blocks,
            timeout_s=SETTLE_S,
        )

    async def forget(self, pod: str) -> None:
        """Empty both tiers of `pod`, and wait until the picker has heard of it. vLLM tells events in steps
        only, so it is given one; a prompt below a block leaves nothing behind."""
        await self.fleet.engine(pod).reset_cache(cpu_tier_too=True)
        nudge = {"prompt": [20, 21, 22], "max_tokens": 1}
        await self.fleet.engine_client(pod).stream(COMPLETIONS, nudge, request_id=f"nudge-{pod}")
        await until(
            f"the picker knows that {pod} holds nothing",
            self.fleet.picker.endpoints,
            lambda rows: rows[pod].blocks_cpu == rows[pod].blocks_device == 0,
            timeout_s=SETTLE_S,
        )
