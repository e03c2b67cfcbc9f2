"""What each request of the soak meets, what should become of it, and what did."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field

HOST, ENGINE_HOST, PEER_HOST = "127.0.8.1", "127.0.8.2", "127.0.8.3"
PORT = 8000
ENGINE = {"fine": 70, "slow": 8, "stall": 1, "reset": 9, "garbage": 5, "error": 7}
PREFILLER = {
    "fine": 30,
    "slow": 10,
    "stall": 2,
    "reset": 14,
    "garbage": 12,
    "error": 12,
    "params": 8,
    "dead": 12,
}
CLIENT = {"fine": 64, "pipelined": 20, "slow": 5, "leaves": 9, "half": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """One request and its faults."""

    number: int
    engine: str
    prefiller: str | None  # None: not split
    client: str
    stream: bool
    size: int  # of the prompt, characters

    @property
    def header(self) -> str:
        return f"{self.number}.{self.engine}.{self.prefiller or 'fine'}.{int(self.stream)}"

    @property
    def answer(self) -> bytes:
        return answer_of(self.number, stream=self.stream)

    @property
    def servable(self) -> bool:
        """Whether a well-behaved client must get the engine's answer."""
        return self.client in ("fine", "slow", "pipelined") and self.engine in ("fine", "slow")


def answer_of(number: int, *, stream: bool) -> bytes:
    """The right body for a request."""
    if not stream:
        return json.dumps({"n": number, "text": f"{number} " * 50}).encode()
    return b"".join(b'data: {"n":%d,"i":%d}\n\n' % (number, i) for i in range(12)) + b"data: [DONE]\n\n"


def draw(number: int, chance: random.Random) -> Case:
    """The faults of one request."""

    def pick(weights: dict[str, int]) -> str:
        return chance.choices(list(weights), list(weights.values()))[0]

    prefiller = pick(PREFILLER) if chance.random() < 0.7 else None
    size = chance.choice((10, 1_000, 1_000, 20_000, 200_000))
    return Case(number, pick(ENGINE), prefiller, pick(CLIENT), chance.random() < 0.5, size)


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    forged: list[str] = field(default_factory=list)

    def judge(self, case: Case, raw: bytes | None) -> None:
        for _ in range(2 if case.client == "pipelined" else 1):
            status, body, raw = parse(raw) if raw is not None else (0, None, None)
            right = status == 200 and body == case.answer
            self.outcomes["right" if right else f"status_{status}" if body is not None else "broken"] += 1
            if case.servable and not right:
                self.lost.append(f"{case.header} {case.client}: status {status}")
            if status == 200 and body is not None and body != case.answer:
                self.forged.append(case.header)
            if body is None:
                break  # the connection has ended
        if raw:
            self.forged.append(f"{case.header}: more than was asked for")


def parse(raw: bytes) -> tuple[int, bytes | None, bytes]:
    """Status and body of the first answer, None for a body whose framing did not end, and what follows it."""
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found:
        return 0, None, b""
    status, lower = int(head.split(b" ", 2)[1]), head.lower()
    if b"content-length: " in lower:
        size = int(lower.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return (status, rest[:size], rest[size:]) if len(rest) >= size else (status, None, b"")
    body = bytearray()
    while True:
        line, found, rest = rest.partition(b"\r\n")
        if not found:
            return status, None, b""
        size = int(line, 16)
        if len(rest) < size + 2:
            return status, None, b""
        body += rest[:size]
        rest = rest[size + 2 :]
        if not size:
            return status, bytes(body), rest
