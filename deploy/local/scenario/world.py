"""What the rows share: the fleet, the texts, and what earlier rows left behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deploy.local.fleet import Fleet
from deploy.local.report import Reporter
from deploy.local.scenario.row import Row
from deploy.local.scenario.texts import Message, Texts, chat, question
from deploy.local.waiting import until

OWNER = "engine-a"  # computes the document first; the pod that the scenario makes busy
DOCUMENT_TOKENS = 49_152
SMALL_DOCUMENT_TOKENS = 8_192
ANSWER_TOKENS = 16
DELTA_TOKENS = 2_048


@dataclass(slots=True)
class World:
    """State of one run. `judge_ttft` False: no verdict rests on time."""

    fleet: Fleet
    texts: Texts
    report: Reporter
    judge_ttft: bool
    first_answer: str = ""  # of row 1: what the same prompt must be answered with ever after
    conversation: list[Message] = field(default_factory=list)  # rows 1 and 2, as the owner holds it
    recompute_ttft_ms: float = 0.0  # row 4: the yardstick of TTFT verdicts

    @property
    def others(self) -> tuple[str, ...]:
        """The pods besides the owner."""
        return tuple(pod for pod in self.fleet.spec.pods if pod != OWNER)

    @property
    def block_size(self) -> int:
        return self.fleet.spec.block_size

    @property
    def document(self) -> str:
        return self.texts.document("north quay", DOCUMENT_TOKENS)

    @property
    def small_document(self) -> str:
        return self.texts.document("south quay", SMALL_DOCUMENT_TOKENS)

    def body(self, text: str, *, small: bool = False) -> dict[str, Any]:
        """A one-turn question about the document (or the small one)."""
        document = self.small_document if small else self.document
        return chat([question(document, text)], max_tokens=ANSWER_TOKENS)

    def finish(self, row: Row) -> Row:
        self.report.row(row)
        return row

    async def until_known(self, pod: str, tokens: int) -> None:
        """Until the picker has heard that `pod` holds at least `tokens` in its CPU tier."""
        blocks = tokens // self.block_size
        await until(
            f"the picker knows of {blocks} blocks in the CPU tier of {pod}",
            self.fleet.picker.endpoints,
            lambda rows: rows[pod].blocks_cpu >= blocks,
        )

    async def forget(self, pods: Iterable[str]) -> None:
        """Empty both tiers of `pods`, and wait until the picker has heard of it."""
        emptied = list(pods)
        for pod in emptied:
            await self.fleet.engine(pod).reset_cache(cpu_tier_too=True)
        await until(
            f"the picker knows that {', '.join(emptied)} hold nothing",
            self.fleet.picker.endpoints,
            lambda rows: all(rows[pod].blocks_cpu == rows[pod].blocks_device == 0 for pod in emptied),
        )
