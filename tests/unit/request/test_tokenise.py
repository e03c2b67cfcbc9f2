"""The tokeniser service: the engine's tokens or None, within the budget, never raising."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp.request.cut_rules import CutRules
from epp.request.incremental import LONG_SEGMENT_CHARS, MAX_SEGMENT_CHARS
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from epp.request.tokenise import LocalTokeniser

BOUND_S = 30.0


class UncutTokenizer(LocalTokenizer):
    """One segment a text, and nothing is encoded before the test asks for it."""

    rules = CutRules()

    def cut_rules(self) -> CutRules:
        return self.rules


class SlowTokenizer(UncutTokenizer):
    """The real tokenizer behind a gate: `entered` tells that a thread is inside."""

    gate: threading.Event
    entered: threading.Event

    @classmethod
    def behind(cls, tokenizer: LocalTokenizer) -> SlowTokenizer:
        slow = cls.__new__(cls)
        slow.__dict__.update(tokenizer.__dict__)
        slow.gate, slow.entered = threading.Event(), threading.Event()
        return slow

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.entered.set()
        assert self.gate.wait(BOUND_S)
        return super().encode(text, add_special_tokens)


class BrokenTokenizer(UncutTokenizer):
    """Raises the given error, as a binding that panics would."""

    error: BaseException

    @classmethod
    def raising(cls, tokenizer: LocalTokenizer, error: BaseException) -> BrokenTokenizer:
        broken = cls.__new__(cls)
        broken.__dict__.update(tokenizer.__dict__)
        broken.error = error
        return broken

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise self.error


DOCUMENT = " ".join(f"The library opens at {number}." for number in range(2000))


async def listed(service: LocalTokeniser, prompt: Prompt) -> list[int]:
    ids = await service.token_ids(prompt)
    assert isinstance(ids, array), "a buffer, which the index takes as it is"
    assert ids.typecode == "I"
    return ids.tolist()


@pytest.fixture
async def service(tokenizer: LocalTokenizer) -> AsyncIterator[LocalTokeniser]:
    service = LocalTokeniser(tokenizer, budget_s=BOUND_S)
    yield service
    await service.aclose()


async def test_text_gets_one_begin_token(service: LocalTokeniser, tokenizer: LocalTokenizer) -> None:
    """S-C15."""
    ids = await listed(service, TextPrompt("The harbour was quiet."))
    assert ids == [0, *tokenizer.encode("The harbour was quiet.", add_special_tokens=False)]
    assert service.counters.outcomes == {"encoded": 1}
    assert service.counters.encoded_tokens == len(ids) - 1, "all but the begin token"


async def test_chat_is_the_whole_text_encoded_once(
    service: LocalTokeniser, tokenizer: LocalTokenizer
) -> None:
    """S-C15: no doubled begin token; the special tokens of the template are single ids."""
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    ids = await listed(service, ChatPrompt(messages))
    text = "<|bos|><|system|>Be short.<|end|><|user|>Hi<|end|><|assistant|>"
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(0) == 1


async def test_a_turn_encodes_only_what_is_new(service: LocalTokeniser) -> None:
    """The second turn of a conversation on a long document."""
    document = {"role": "system", "content": DOCUMENT}
    turns = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At eight."}]
    first = await listed(service, ChatPrompt([document, *turns[:1]]))
    encoded = service.counters.encoded_tokens
    assert encoded == len(first)
    second = await listed(service, ChatPrompt([document, *turns, *turns[:1]]))
    assert second[: len(first)] == first
    assert service.counters.encoded_tokens - encoded < 1000 < len(second) // 10
    assert service.counters.encoded_tokens + service.counters.reused_tokens == len(first) + len(second)
    assert service.cache_bytes >= 4 * len(first)


async def test_conversations_share_what_they_have_in_common(service: LocalTokeniser) -> None:
    for question in ("When?", "Where?", "Why?"):
        await listed(service, ChatPrompt([{"role": "user", "content": f"{DOCUMENT}\n\n{question}"}]))
    counters = service.counters
    assert counters.encoded_tokens < counters.reused_tokens


async def test_token_ids_pass_without_a_tokenizer_call(tokenizer: LocalTokenizer) -> None:
    """S-B02."""
    service = LocalTokeniser(BrokenTokenizer.raising(tokenizer, AssertionError()), budget_s=BOUND_S)
    assert await service.token_ids(TokenPrompt([151644, 8948, 198])) == [151644, 8948, 198]
    assert service.counters.outcomes == {"given": 1}
    await service.aclose()


async def test_the_whole_conversation_decides(service: LocalTokeniser) -> None:
    """S-B07: with one system text, two histories part where they differ, and a turn extends its own."""
    system = {"role": "system", "content": "You are a helpful assistant. " * 20}

    async def ids_of(*texts: str) -> list[int]:
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return await listed(service, ChatPrompt([system, *turns], add_generation_prompt=False))

    anna, bert = await ids_of("I grow beans."), await ids_of("I repair violins.")
    shared = next(i for i, (a, b) in enumerate(zip(anna, bert, strict=False)) if a != b)
    alone = await service.token_ids(ChatPrompt([system], add_generation_prompt=False))
    assert alone is not None
    assert len(alone) < shared < min(len(anna), len(bert))
    assert (await ids_of("I grow beans.", "How nice.", "And peas."))[: len(anna)] == anna


async def test_template_switches_reach_the_template(
    service: LocalTokeniser, tokenizer: LocalTokenizer
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    prompt = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    text = "<|bos|><|user|>Hi<|end|><|assistant|>Once upon"
    assert await listed(service, prompt) == tokenizer.encode(text, add_special_tokens=False)


async def test_unrenderable_chats_are_counted_by_reason(service: LocalTokeniser) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert await service.token_ids(ChatPrompt(image)) is None
    assert await service.token_ids(ChatPrompt(image, continue_final_message=True)) is None
    assert service.counters.outcomes == {"multimodal_part": 1, "continue_and_generate": 1}


async def test_late_is_no_match(tokenizer: LocalTokenizer) -> None:
    slow = SlowTokenizer.behind(tokenizer)
    service = LocalTokeniser(slow, workers=1, budget_s=0.05)
    try:
        assert await service.token_ids(TextPrompt("first")) is None
        assert await asyncio.to_thread(slow.entered.wait, BOUND_S)
        assert await service.token_ids(TextPrompt("waits for the thread")) is None
        assert service.counters.outcomes == {"late": 2}
        assert service.pending == 1, "the second one left the queue, the first still holds its thread"
    finally:
        slow.gate.set()
        await service.aclose()
    assert service.pending == 0


async def test_a_late_text_is_left_at_the_next_segment(tokenizer: LocalTokenizer) -> None:
    """A thread does not go on with a 32 MB body that nobody waits for; what it did is kept."""
    slow = SlowTokenizer.behind(tokenizer)
    slow.rules = tokenizer.cut_rules()
    slow.gate.set()
    service = LocalTokeniser(slow, workers=1, budget_s=0.05)
    slow.gate.clear()
    slow.entered.clear()
    text = "One quiet harbour. " * 1000
    try:
        assert await service.token_ids(TextPrompt(text)) is None
        assert service.counters.outcomes == {"late": 1}
        assert await asyncio.to_thread(slow.entered.wait, BOUND_S)
    finally:
        slow.gate.set()
        await service.aclose()
    assert 0 < service.counters.encoded_tokens < len(tokenizer.encode(text, False)) // 4


async def test_a_short_prompt_does_not_wait_for_a_long_one(tokenizer: LocalTokenizer) -> None:
    """One thread, a text of many segments in it, and a short one that comes later is done first."""
    slow = SlowTokenizer.behind(tokenizer)
    slow.rules = tokenizer.cut_rules()
    slow.gate.set()
    service = LocalTokeniser(slow, workers=1, budget_s=BOUND_S)
    slow.gate.clear()
    slow.entered.clear()
    done: list[str] = []

    async def encode(name: str, text: str) -> None:
        assert await listed(service, TextPrompt(text)) == tokenizer.encode(text, True)
        done.append(name)

    try:
        long = asyncio.create_task(encode("long", " ".join(f"harbour{n}" for n in range(20_000))))
        assert await asyncio.to_thread(slow.entered.wait, BOUND_S)
        short = asyncio.create_task(encode("short", "hi"))
        await asyncio.sleep(0)  # one turn of the loop: it is in the queue
        slow.gate.set()
        await asyncio.gather(long, short)
    finally:
        slow.gate.set()
        await service.aclose()
    assert done == ["short", "long"]


class SlowIfLong(SlowTokenizer):
    """Only what is long waits at the gate."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > LONG_SEGMENT_CHARS:
            return super().encode(text, add_special_tokens)
        return LocalTokenizer.encode(self, text, add_special_tokens)


async def test_nobody_waits_for_a_text_that_cannot_be_cut(tokenizer: LocalTokenizer) -> None:
    """Megabytes without a blank are one call of seconds: they have a thread of their own."""
    slow = SlowIfLong.behind(tokenizer)
    service = LocalTokeniser(slow, workers=1, budget_s=BOUND_S)
    text = "x" * (LONG_SEGMENT_CHARS + 1)
    long = asyncio.create_task(service.token_ids(TextPrompt(text)))
    try:
        assert await asyncio.to_thread(slow.entered.wait, BOUND_S)
        assert await listed(service, TextPrompt("Hi")) == tokenizer.encode("Hi", True)
        assert not long.done()
        slow.gate.set()
        ids = await long
        assert ids is not None
        assert list(ids) == tokenizer.encode(text, True)
    finally:
        slow.gate.set()
        await service.aclose()


class CountingTokenizer(UncutTokenizer):
    """Notes how much is encoded at once."""

    chars: list[int]

    @classmethod
    def of(cls, tokenizer: LocalTokenizer) -> CountingTokenizer:
        counting = cls.__new__(cls)
        counting.__dict__.update(tokenizer.__dict__)
        counting.chars = []
        return counting

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.chars.append(len(text))
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize("chars", [LONG_SEGMENT_CHARS * 8, MAX_SEGMENT_CHARS + 1, 4 << 20])
async def test_a_text_without_a_place_to_cut_and_of_too_many_tokens_is_not_encoded(
    tokenizer: LocalTokenizer, chars: int
) -> None:
    """Its ids would come in one piece, which nothing can interrupt: no match, by name."""
    counting = CountingTokenizer.of(tokenizer)
    service = LocalTokeniser(counting, budget_s=BOUND_S)
    text = ("0aZ9" * (chars // 4 + 1))[:chars]
    assert await service.token_ids(TextPrompt(text)) is None
    assert service.counters.outcomes == {"long_text": 1}
    assert sum(counting.chars) < LONG_SEGMENT_CHARS, "samples at most"
    await service.aclose()


async def test_the_loop_turns_while_a_long_text_is_encoded(tokenizer: LocalTokenizer) -> None:
    counting = CountingTokenizer.of(tokenizer)
    service = LocalTokeniser(counting, budget_s=BOUND_S)
    text = "harbour" * (2 * LONG_SEGMENT_CHARS // 7)
    task = asyncio.create_task(service.token_ids(TextPrompt(text)))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += bool(counting.chars)
    assert (await task) is not None
    assert max(counting.chars) == len(text)
    assert turns > 10
    await service.aclose()


async def test_overload_is_no_match_at_once(tokenizer: LocalTokenizer) -> None:
    slow = SlowTokenizer.behind(tokenizer)
    service = LocalTokeniser(slow, workers=1, max_pending=2, budget_s=BOUND_S)
    try:
        waiting = [asyncio.create_task(listed(service, TextPrompt(text))) for text in ("a", "b")]
        assert await asyncio.to_thread(slow.entered.wait, BOUND_S)
        assert await service.token_ids(TextPrompt("c")) is None
        assert service.counters.outcomes == {"overloaded": 1}
        slow.gate.set()
        assert await asyncio.gather(*waiting) == [tokenizer.encode(text, True) for text in ("a", "b")]
    finally:
        slow.gate.set()
        await service.aclose()


async def test_a_cancelled_caller_frees_its_place(tokenizer: LocalTokenizer) -> None:
    slow = SlowTokenizer.behind(tokenizer)
    service = LocalTokeniser(slow, workers=1, budget_s=BOUND_S)
    try:
        running = asyncio.create_task(listed(service, TextPrompt("a")))
        assert await asyncio.to_thread(slow.entered.wait, BOUND_S)
        queued = asyncio.create_task(service.token_ids(TextPrompt("b")))
        await asyncio.sleep(0)  # one turn of the loop: it is in the executor's queue now
        assert service.pending == 2
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert service.pending == 1
        slow.gate.set()
        assert await running == tokenizer.encode("a", True)
    finally:
        slow.gate.set()
        await service.aclose()


class Panic(BaseException):
    """What pyo3 raises: no `Exception`."""


@pytest.mark.parametrize("error", [ValueError("zebra-prompt"), Panic("zebra-prompt")])
async def test_a_fault_of_the_tokenizer_is_no_match_and_no_leak(
    tokenizer: LocalTokenizer, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    service = LocalTokeniser(BrokenTokenizer.raising(tokenizer, error), budget_s=BOUND_S)
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            assert await service.token_ids(TextPrompt("zebra-prompt")) is None
    await service.aclose()
    assert service.counters.outcomes == {"failed": 3}
    assert type(error).__name__ in caplog.text
    assert "BrokenTokenizer.encode" in caplog.text, "the place is named"
    assert "zebra" not in caplog.text
    assert len([r for r in caplog.records if r.name == "epp.request.tokenise"]) == 1, "once a place"


async def test_a_lone_surrogate_is_no_match(service: LocalTokeniser) -> None:
    assert await service.token_ids(TextPrompt("\ud800")) is None
    assert service.counters.outcomes == {"failed": 1}


async def test_after_close_nothing_is_encoded(tokenizer: LocalTokenizer) -> None:
    service = LocalTokeniser(tokenizer)
    await service.aclose()
    assert await service.token_ids(TextPrompt("a")) is None


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["<|user|>", "<|end|> <|bos|>", "  ", "\n\n", "1234", "word12 345"]
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}),
    min_size=1,
    max_size=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(MESSAGES, st.booleans())
def test_chat_parity_with_whole_text(
    tokenizer: LocalTokenizer, messages: list[dict[str, Any]], generate: bool
) -> None:
    """Ids of a chat are those of its rendered text, whatever special tokens the user writes into it."""

    async def both() -> None:
        service = LocalTokeniser(tokenizer, workers=1, budget_s=BOUND_S)
        ids = await listed(service, ChatPrompt(messages, add_generation_prompt=generate))
        await service.aclose()
        marks = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
        text = "<|bos|>" + "".join(f"{marks[m['role']]}{m['content']}<|end|>" for m in messages)
        text += "<|assistant|>" if generate else ""
        assert ids == tokenizer.encode(text, add_special_tokens=False)

    asyncio.run(both())
