"""From a parsed prompt to the engine's token ids, off the event loop and within a budget.

Why a service: encoding a 48K-token prompt takes 60-80 ms of CPU, fifty times the rest of a
decision. It runs in a few threads (`encode_batch_fast` releases the GIL), segment by segment, and
segments seen before cost a look-up (`incremental`). Whatever goes wrong (late, overloaded, not
renderable, a fault of the tokenizer) the answer is None: no match, counted by reason, and the request
is routed by load. Prompts and tokens appear in no log.
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol

from epp.request.chat import Unrenderable
from epp.request.incremental import GivenUp, IncrementalEncoder
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from epp.request.token_cache import DEFAULT_CACHE_BYTES, TokenCache

_log = logging.getLogger(__name__)

DEFAULT_BUDGET_S: Final = 1.0
MAX_DEFAULT_WORKERS: Final = 4
DEFAULT_MAX_PENDING: Final = 64


@dataclass(slots=True)
class TokeniserCounters:
    """Plain values for the metrics shell. `outcomes` has a bounded set of keys: "encoded", "given"
    (token ids came with the request), "late", "overloaded", "failed", and reasons of `Unrenderable`.
    Token counts are of text only: what a tokenizer encoded, and what was remembered instead."""

    outcomes: Counter[str] = field(default_factory=Counter)
    encoded_tokens: int = 0
    reused_tokens: int = 0


class Tokeniser(Protocol):
    """A back end that knows the engine's tokens."""

    @property
    def counters(self) -> TokeniserCounters: ...

    async def token_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """The engine's token ids of `prompt`; None: not known exactly (counted). Never raises, and
        never takes longer than the back end's budget."""
        ...

    async def aclose(self) -> None: ...


class LocalTokeniser:
    """The model's tokenizer in this process. Use it from one event loop."""

    def __init__(
        self,
        tokenizer: LocalTokenizer,
        *,
        workers: int | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
        budget_s: float = DEFAULT_BUDGET_S,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """`workers` threads; None: as many as there are cores but one, which the event loop needs, and at
        most four. `max_pending` bounds prompts that run or wait for a thread; more are "overloaded".
        `cache_bytes` bounds the memory of token ids seen before. Blocks: examines the tokenizer."""
        self._tokenizer = tokenizer
        self.rules: Final = tokenizer.cut_rules()
        self._cache = TokenCache(cache_bytes)
        self._encoder = IncrementalEncoder(tokenizer, self.rules, self._cache)
        self._executor = ThreadPoolExecutor(workers or _default_workers(), thread_name_prefix="tokenise")
        self._max_pending = max_pending
        self._budget_s = budget_s
        self._pending: set[Future[array[int]]] = set()
        self._counters = TokeniserCounters()
        self._reported: set[str] = set()  # places in code: bounded

    @property
    def counters(self) -> TokeniserCounters:
        encoder = self._encoder.counters
        self._counters.encoded_tokens = encoder.encoded_tokens
        self._counters.reused_tokens = encoder.reused_tokens
        return self._counters

    @property
    def cache_bytes(self) -> int:
        """What remembered ids take now."""
        return self._cache.size_bytes

    @property
    def pending(self) -> int:
        """Prompts that run or wait now, late ones included until their thread is free again."""
        self._pending = {future for future in self._pending if not future.done()}
        return len(self._pending)

    async def token_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """See `Tokeniser`. Token ids that came with the request cost no tokenizer call."""
        if isinstance(prompt, TokenPrompt):
            self._counters.outcomes["given"] += 1
            return prompt.token_ids
        if self.pending >= self._max_pending:
            self._counters.outcomes["overloaded"] += 1
            return None
        ids, outcome = await self._encode_within_budget(prompt)
        self._counters.outcomes[outcome] += 1
        return ids

    async def aclose(self) -> None:
        """Drop what waits, let what runs end (no encoding can be interrupted)."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)

    async def _encode_within_budget(self, prompt: TextPrompt | ChatPrompt) -> tuple[array[int] | None, str]:
        caller = _Caller()
        try:
            future = self._executor.submit(self._encode, prompt, caller.has_left)
        except RuntimeError:  # closed
            return None, "overloaded"
        self._pending.add(future)
        try:
            async with asyncio.timeout(self._budget_s):
                return await asyncio.wrap_future(future), "encoded"
        except TimeoutError:
            return None, "late"
        except Unrenderable as error:
            return None, error.reason
        except _EncodingFailed as error:
            self._report(str(error))
            return None, "failed"
        finally:
            future.cancel()  # takes it out of the queue if no thread has begun with it
            caller.left = True  # and a thread that has begun stops at the next segment

    def _encode(self, prompt: TextPrompt | ChatPrompt, given_up: Callable[[], bool]) -> array[int]:
        """Runs in a worker thread. Chat: the template writes its own begin token, so none is added."""
        try:
            text = prompt.text if isinstance(prompt, TextPrompt) else _render(self._tokenizer, prompt)
            return self._encoder.encode(text, prompt.add_special_tokens, given_up)
        except (Unrenderable, GivenUp):
            raise
        except BaseException as error:  # noqa: BLE001  # task guard; a panic of the binding is no `Exception`
            raise _EncodingFailed(f"{type(error).__name__} at {_place(error)}") from None

    def _report(self, place: str) -> None:
        if place not in self._reported:
            self._reported.add(place)
            _log.warning("tokenizer failed, requests like this are routed by load: %s", place)


def _default_workers() -> int:
    return max(1, min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)) - 1))


class _Caller:
    """Who waits for a text; read by the thread that encodes it."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = False

    def has_left(self) -> bool:
        return self.left


class _EncodingFailed(Exception):
    """A fault of tokenizer or template; the message names type and place, never the input."""


def _render(tokenizer: LocalTokenizer, prompt: ChatPrompt) -> str:
    return tokenizer.render_chat(
        prompt.messages,
        prompt.tools,
        prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        **prompt.template_kwargs,
    )


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "?" if trace is None else f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"
