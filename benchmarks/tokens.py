"""`make bench NAME=tokens`: what understanding a request costs, against encoding its whole text.

The shipped byte-level BPE (8,192 entries, the usual pattern and special tokens) and its chat template, on
sentences made from its word list. Every figure goes through the service the picker uses, rendering
included; "whole" is the tokenizer alone on ready text. CPU times are of the process. Last line: JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import string
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvloop

from epp.request.cut_rules import CutRules
from epp.request.incremental import MAX_SEGMENT_TOKENS
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import ChatPrompt, TextPrompt, parse_request
from epp.request.tokenise import LocalTokeniser

DIRECTORY = Path(__file__).resolve().parents[1] / "config" / "tokenizer"
DOCUMENT_TOKENS = 40_000
TURN_TOKENS = 800
TURNS = 10
LONG_TOKENS = 48_000
BODY_BYTES = 1024
STALL_RUNS = 5
CONVERSATIONS = 4
BUDGET_S = 60.0

Messages = list[dict[str, str]]


class Whole(LocalTokenizer):
    """The same tokenizer, never cut."""

    def cut_rules(self) -> CutRules:
        return CutRules()


class Texts:
    """Sentences that never repeat, about `tokens` tokens of them."""

    def __init__(self, tokenizer: LocalTokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        self._words = (DIRECTORY / "words.txt").read_text(encoding="utf-8").split()
        sample = self._take(2000)
        self._chars_per_token = len(sample) / len(tokenizer.encode(sample, False))

    def of_tokens(self, tokens: int) -> str:
        return self.of_chars(int(tokens * self._chars_per_token))

    def of_chars(self, chars: int) -> str:
        text = ""
        while len(text) < chars:
            text += self._take((chars - len(text)) // 6 + 10)
        return text[:chars]

    def _take(self, words: int) -> str:
        return "".join(self._sentence() for _ in range(words // 10 + 1))

    def _sentence(self) -> str:
        """Few words make up most of a text; some numbers, marks and line ends between them."""
        rng = self._rng
        picked = [self._words[int(len(self._words) * rng.random() ** 3)] for _ in range(rng.randint(6, 14))]
        if rng.random() < 0.3:
            picked[rng.randrange(len(picked))] = str(rng.randrange(10_000))
        return " ".join(picked).capitalize() + rng.choice((". ", ". ", ", ", "? ", ".\n", ".\n\n"))


def conversation(texts: Texts, turns: int) -> Messages:
    """A document, then `turns` turns; the last one is the user's."""
    messages = [{"role": "system", "content": texts.of_tokens(DOCUMENT_TOKENS)}]
    for _ in range(turns - 1):
        messages.append({"role": "user", "content": texts.of_tokens(TURN_TOKENS // 2)})
        messages.append({"role": "assistant", "content": texts.of_tokens(TURN_TOKENS // 2)})
    return [*messages, {"role": "user", "content": texts.of_tokens(TURN_TOKENS)}]


def grown(texts: Texts, messages: Messages) -> Messages:
    """The next turn: an answer and a question, 800 tokens together."""
    half = TURN_TOKENS // 2
    return [
        *messages,
        {"role": "assistant", "content": texts.of_tokens(half)},
        {"role": "user", "content": texts.of_tokens(half)},
    ]


def whole_ids(tokenizer: LocalTokenizer, text: str) -> array[int]:
    return array("I", tokenizer.encode(text, add_special_tokens=False))


# --- turn 10 of a conversation --------------------------------------------------------------------
async def measure_turns(tokenizer: LocalTokenizer, texts: Texts) -> dict[str, float]:
    """CPU of turn 10 after nine turns were seen, and of its whole text; medians over conversations."""
    service = LocalTokeniser(tokenizer, budget_s=BUDGET_S)
    turn, whole, first, render = [], [], [], []
    for _ in range(9):
        messages = conversation(texts, 1)
        started = time.process_time()
        await service.token_ids(ChatPrompt(messages))
        first.append(time.process_time() - started)
        for _ in range(TURNS - 1):
            messages = grown(texts, messages)
            started = time.process_time()
            ids = await service.token_ids(ChatPrompt(messages))
            cost_s = time.process_time() - started
        turn.append(cost_s)
        started = time.process_time()
        text = tokenizer.render_chat(messages)
        rendered = time.process_time()
        expected = whole_ids(tokenizer, text)
        whole.append(time.process_time() - rendered)
        render.append(rendered - started)
        assert ids == expected, "not the tokens of the whole text"
    await service.aclose()
    return {
        "tokens": float(len(expected)),
        "first_ms": statistics.median(first) * 1e3,
        "turn10_ms": statistics.median(turn) * 1e3,
        "whole_ms": statistics.median(whole) * 1e3,
        "render_ms": statistics.median(render) * 1e3,
    }


# --- small requests -------------------------------------------------------------------------------
async def measure_small(tokenizer: LocalTokenizer, texts: Texts) -> tuple[float, float]:
    """CPU ms of parsing and tokenising one new 1 KB chat request, and of the tokenizer alone for such a text
    (which no router can go below); the best of 20 batches of 50, taken in turns."""
    service = LocalTokeniser(tokenizer, budget_s=BUDGET_S)
    empty = {"model": "m", "messages": [{"role": "user", "content": ""}], "stream": True}
    room = BODY_BYTES - len(orjson.dumps(empty))
    costs, alone = [], []
    for _ in range(20):
        bodies = [_small_body(texts.of_chars(room)) for _ in range(50)]
        started = time.process_time()
        await _understand(service, bodies)
        costs.append((time.process_time() - started) / len(bodies))
        rendered = [
            tokenizer.render_chat([{"role": "user", "content": texts.of_chars(room)}]) for _ in range(50)
        ]
        started = time.process_time()
        for text in rendered:
            tokenizer.encode(text, add_special_tokens=False)
        alone.append((time.process_time() - started) / len(rendered))
    await service.aclose()
    return min(costs) * 1e3, min(alone) * 1e3


def _small_body(text: str) -> bytes:
    fields = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True}
    return orjson.dumps(fields)


async def _understand(service: LocalTokeniser, bodies: Sequence[bytes]) -> None:
    for body in bodies:
        parsed = parse_request(body, "/v1/chat/completions", {})
        assert parsed.prompt is not None
        if service.answers_at_once(parsed.prompt, parsed.size_bytes):  # as the director does
            assert service.token_ids_at_once(parsed.prompt) is not None
        else:
            assert await service.token_ids(parsed.prompt) is not None


# --- the event loop -------------------------------------------------------------------------------
async def measure_stall(tokenizer: LocalTokenizer, texts: Texts) -> tuple[float, float]:
    """Longest lateness of a 1 ms timer (ms) while four new 48K prompts are tokenised, and while the
    workers are idle for as long; medians of 5 runs each."""
    busy, idle = [], []
    for _ in range(STALL_RUNS):
        service = LocalTokeniser(tokenizer, budget_s=BUDGET_S)
        prompts = [TextPrompt(texts.of_tokens(LONG_TOKENS)) for _ in range(4)]
        started = time.perf_counter()
        busy.append(await _longest_stall_ms(asyncio.gather(*(service.token_ids(p) for p in prompts))))
        idle.append(await _longest_stall_ms(asyncio.sleep(time.perf_counter() - started)))
        await service.aclose()
    return statistics.median(busy), statistics.median(idle)


async def measure_uncut_stall(tokenizer: LocalTokenizer) -> float:
    """The same for texts without a place to cut (letters and digits at random): one just below what is read
    at once, and one of 4 MiB, which is refused."""
    rng, stalls = random.Random(8), []
    letters = string.ascii_letters + string.digits
    for _ in range(STALL_RUNS):
        service = LocalTokeniser(tokenizer, budget_s=BUDGET_S)
        sample = "".join(rng.choices(letters, k=10_000))
        chars = int(0.95 * MAX_SEGMENT_TOKENS * len(sample) / len(tokenizer.encode(sample, False)))
        prompts = [TextPrompt("".join(rng.choices(letters, k=size))) for size in (chars, 4 << 20)]
        stalls.append(
            await _longest_stall_ms(asyncio.gather(*(service.token_ids(prompt) for prompt in prompts)))
        )
        assert set(service.counters.outcomes) == {"encoded", "long_text"}
        await service.aclose()
    return statistics.median(stalls)


async def _longest_stall_ms(work: Any) -> float:
    task = asyncio.ensure_future(work)
    longest = 0.0
    while not task.done():
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - due)
    return longest * 1e3


# --- sustained ------------------------------------------------------------------------------------
async def measure_rate(tokenizer: LocalTokenizer, texts: Texts, turns: int) -> float:
    """Requests per second of conversations of 48K tokens that grow by a turn with every request."""
    service = LocalTokeniser(tokenizer, budget_s=BUDGET_S)
    prompts = []
    for _ in range(CONVERSATIONS):
        messages = conversation(texts, TURNS)
        await service.token_ids(ChatPrompt(messages))
        prompts.append([ChatPrompt(m) for m in _next_turns(texts, messages, turns)])
    started = time.perf_counter()
    await asyncio.gather(*(_talk(service, conversation_prompts) for conversation_prompts in prompts))
    rate = CONVERSATIONS * turns / (time.perf_counter() - started)
    await service.aclose()
    return rate


def _next_turns(texts: Texts, messages: Messages, turns: int) -> Iterator[Messages]:
    for _ in range(turns):
        messages = grown(texts, messages)
        yield messages


async def _talk(service: LocalTokeniser, prompts: Sequence[ChatPrompt]) -> None:
    for prompt in prompts:
        assert await service.token_ids(prompt) is not None


async def measure() -> dict[str, float]:
    sys.setswitchinterval(0.001)  # as the picker does, and the next line, too
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = LocalTokenizer.load(DIRECTORY)
    whole = Whole.load(DIRECTORY)
    texts = Texts(tokenizer, seed=4)
    turns = await measure_turns(tokenizer, texts)
    small_ms, small_alone_ms = await measure_small(tokenizer, texts)
    busy_ms, idle_ms = await measure_stall(tokenizer, texts)
    uncut_ms = await measure_uncut_stall(tokenizer)
    cached = await measure_rate(tokenizer, texts, turns=20)
    uncached = await measure_rate(whole, texts, turns=5)
    print(f"conversation of {turns['tokens']:.0f} tokens, CPU: whole text {turns['whole_ms']:.1f} ms,")
    print(f"  first turn {turns['first_ms']:.1f} ms, turn 10 {turns['turn10_ms']:.2f} ms,")
    print(f"  of which rendering {turns['render_ms']:.2f} ms")
    print(f"1 KB chat request, parse and tokenise: {small_ms:.3f} ms CPU;")
    print(f"  the tokenizer alone, on such a text: {small_alone_ms:.3f} ms")
    print(f"longest stall of the loop: {busy_ms:.2f} ms with four new 48K prompts, {idle_ms:.2f} ms idle")
    print(f"  and {uncut_ms:.2f} ms with a text of {MAX_SEGMENT_TOKENS} tokens without a place to cut")
    print(
        f"48K conversations, a new turn each: {cached:.1f} requests/s, whole text {uncached:.1f} requests/s"
    )
    return {
        "turn10_share": round(turns["turn10_ms"] / turns["whole_ms"], 4),
        "parse_1k_cpu_ms": round(small_ms, 3),
        "parse_1k_tokenizer_share": round(small_alone_ms / small_ms, 2),
        "longest_stall_ms": round(busy_ms - idle_ms, 2),
        "uncut_stall_ms": round(uncut_ms - idle_ms, 2),
        "cached_vs_whole_rps": round(cached / uncached, 1),
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(measure())))
