"""From a parsed prompt to the engine's token ids, off the event loop and within a budget.

Why a service: encoding a 48K-token prompt takes 60-80 ms of CPU, fifty times the rest of a
decision. It runs in a few threads (`encode_batch_fast` releases the GIL), segment by segment, and
segments seen before cost a look-up (`incremental`). Prompts take turns of a few segments, so that a
short one does not wait until a 5 MB one is done, and a text that cannot be cut has a thread of its own.
Whatever goes wrong (late, overloaded, not renderable, a fault of the tokenizer) the answer is None: no
match, counted by reason, and the request is routed by load. Prompts and tokens appear in no log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from array import array
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol

from epp.request.chat import Unrenderable
from epp.request.incremental import IncrementalEncoder
from epp.request.local_tokenizer import LocalTokenizer
from epp.request.parse import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from epp.request.token_cache import DEFAULT_CACHE_BYTES, TokenCache

_log = logging.getLogger(__name__)

DEFAULT_BUDGET_S: Final = 1.0
MAX_DEFAULT_WORKERS: Final = 4
SEGMENTS_A_TURN: Final = 8  # about 10 ms
DEFAULT_MAX_PENDING: Final = 64
AT_ONCE_BYTES: Final = 2 << 10  # of a request: a thread and back costs more than encoding this much


@dataclass(slots=True)
class TokeniserCounters:
    """Plain values for the metrics shell. `outcomes` has a bounded set of keys: "encoded", "prefix" (what is
    in front of a picture or the like), "given" (token ids came with the request), "late", "overloaded",
    "failed", and reasons of `Unrenderable`.
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

    def answers_at_once(self, prompt: Prompt, size_bytes: int) -> bool:
        """Whether the tokens of `prompt`, from a body of `size_bytes` (decoded), need no wait."""
        ...

    def token_ids_at_once(self, prompt: Prompt) -> Sequence[int] | None:
        """As `token_ids`, of a prompt that `answers_at_once` is True for."""
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
        # what cannot be cut is one call of up to seconds: nobody else waits for it
        self._long_executor = ThreadPoolExecutor(1, thread_name_prefix="tokenise-long")
        self._max_pending = max_pending
        self._budget_s = budget_s
        self._jobs: set[_Job] = set()
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
        self._jobs = {job for job in self._jobs if not job.done}
        return len(self._jobs)

    async def token_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """See `Tokeniser`. Token ids that came with the request cost no tokenizer call."""
        if isinstance(prompt, TokenPrompt):
            return self.token_ids_at_once(prompt)
        if self.pending >= self._max_pending:
            self._counters.outcomes["overloaded"] += 1
            return None
        ids, outcome = await self._encode_within_budget(prompt)
        self._counters.outcomes[outcome] += 1
        return ids

    def answers_at_once(self, prompt: Prompt, size_bytes: int) -> bool:
        """See `Tokeniser`. Template and text of so small a request take well under a millisecond."""
        return isinstance(prompt, TokenPrompt) or size_bytes <= AT_ONCE_BYTES

    def token_ids_at_once(self, prompt: Prompt) -> Sequence[int] | None:
        """See `Tokeniser`."""
        if isinstance(prompt, TokenPrompt):
            self._counters.outcomes["given"] += 1
            return prompt.token_ids
        ids, outcome = None, _outcome(prompt)
        try:
            steps = self._steps(prompt)
            while True:
                next(steps)
        except StopIteration as end:
            ids = end.value
        except Unrenderable as error:
            outcome = error.reason
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # a panic of the binding is no `Exception`
            self._report(f"{type(error).__name__} at {_place(error)}")
            outcome = "failed"
        self._counters.outcomes[outcome] += 1
        return ids

    async def aclose(self) -> None:
        """Drop what waits, let what runs end (no encoding can be interrupted)."""
        for executor in (self._executor, self._long_executor):
            await asyncio.to_thread(executor.shutdown, wait=True, cancel_futures=True)

    async def _encode_within_budget(self, prompt: TextPrompt | ChatPrompt) -> tuple[array[int] | None, str]:
        job = _Job(self._steps(prompt))
        if not self._queue(job, self._executor):
            return None, "overloaded"
        self._jobs.add(job)
        late = job.loop.call_later(self._budget_s, job.settle, None, None)
        try:
            ids = await job.result
            if ids is None:
                return None, "late"
            return ids, _outcome(prompt)
        except Unrenderable as error:
            return None, error.reason
        except _EncodingFailed as error:
            self._report(str(error))
            return None, "failed"
        finally:
            late.cancel()
            job.leave()

    def _queue(self, job: _Job, executor: ThreadPoolExecutor) -> bool:
        """Let a thread give `job` its next turn; False: closed."""
        try:
            job.turn = executor.submit(self._run_turn, job)
        except RuntimeError:
            return False
        return True

    def _run_turn(self, job: _Job) -> None:
        """Runs in a worker thread: a few segments, then the job goes behind those that wait."""
        executor = self._executor
        try:
            for _ in range(SEGMENTS_A_TURN):
                if job.left:
                    return
                if next(job.steps):
                    executor = self._long_executor
                    break
        except StopIteration as end:
            job.finish(end.value, None)
        except BaseException as error:  # noqa: BLE001  # task guard; a panic of the binding is no `Exception`
            if not isinstance(error, Unrenderable):
                error = _EncodingFailed(f"{type(error).__name__} at {_place(error)}")
            job.finish(None, error)
        else:
            if not self._queue(job, executor):
                job.finish(None, _EncodingFailed("closed"))

    def _steps(self, prompt: TextPrompt | ChatPrompt) -> Generator[bool, None, array[int]]:
        """Chat: the template writes its own begin token, so none is added unless the client wants it."""
        if isinstance(prompt, TextPrompt):
            return (yield from self._encoder.steps(prompt.text, prompt.add_special_tokens))
        places = self._tokenizer.item_places
        if prompt.items and not places.admits(prompt.items):
            raise Unrenderable("multimodal_model")
        text = self._tokenizer.prompt_text(prompt)
        ids = yield from self._encoder.steps(text, prompt.add_special_tokens)
        if not prompt.items:
            return ids
        before = places.tokens_before(ids)
        if not before:
            raise Unrenderable("multimodal_place")
        return before

    def _report(self, place: str) -> None:
        if place not in self._reported:
            self._reported.add(place)
            _log.warning("tokenizer failed, requests like this are routed by load: %s", place)


def _outcome(prompt: Prompt) -> str:
    return "prefix" if isinstance(prompt, ChatPrompt) and prompt.items else "encoded"


def _default_workers() -> int:
    return max(1, min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)) - 1))


class _Job:
    """A prompt on its way through the threads, one turn at a time. Made on the loop that waits for it."""

    __slots__ = ("_finished", "left", "loop", "result", "steps", "turn")

    def __init__(self, steps: Generator[bool, None, array[int]]) -> None:
        self.steps = steps
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[array[int] | None] = self.loop.create_future()  # None: late
        self.turn: Future[None] | None = None
        self.left = False  # nobody waits any more: read by the thread between two segments
        self._finished = False

    def finish(self, ids: array[int] | None, error: BaseException | None) -> None:
        """In a thread: no turn comes after this one."""
        self._finished = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.settle, ids, error)

    def settle(self, ids: array[int] | None, error: BaseException | None) -> None:
        """On the loop: the first word is the one that counts."""
        if self.result.done():
            return
        if error is None:
            self.result.set_result(ids)
        else:
            self.result.set_exception(error)

    def leave(self) -> None:
        self.left = True
        if self.turn is not None:
            self.turn.cancel()  # takes it out of the queue if no thread has begun with it

    @property
    def done(self) -> bool:
        """It holds no thread and waits for none."""
        return self._finished or (self.left and self.turn is not None and self.turn.done())


class _EncodingFailed(Exception):
    """A fault of tokenizer or template; the message names type and place, never the input."""


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "?" if trace is None else f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"
