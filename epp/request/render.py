"""Token ids from vLLM's own render endpoint: of a pool member, or of a render server beside the picker.

Why: where the picker cannot have the model's files, the engine itself says what its tokens are.
Semantics: vLLM 0.32 `/v1/chat/completions/render` and `/v1/completions/render`, which a server offers
under `--enable-scale-out` or as `vllm launch render`. Every call has one deadline, every answer a
size limit, every member a circuit breaker; whatever goes wrong is "no match", counted. Bodies,
answers and keys appear in no log.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp

from epp.request.circuit_breaker import CircuitBreaker
from epp.request.parse import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from epp.request.render_answer import RenderFault, read_token_ids
from epp.request.render_call import Unwritable, render_call
from epp.request.tokenise import TokeniserCounters

_log = logging.getLogger(__name__)

MAX_MEMBERS: Final = 4096  # whose breakers are remembered
_ATTEMPTS: Final = 2  # a second member is asked if the first one fails and time is left
_READ_BYTES: Final = 1 << 16
_KEEP_ALIVE_S: Final = 3.0  # vLLM's server closes after 5 s: do not race with it


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of one back end. `budget_s` is the most it ever adds to a request, `items_budget_s` to one with
    pictures and the like; None: those are not asked for, since the endpoint fetches and decodes them."""

    budget_s: float = 1.0
    items_budget_s: float | None = None
    max_in_flight: int = 32  # more are "overloaded" at once: no queue
    max_body_bytes: int = 4 << 20
    max_answer_bytes: int = 4 << 20  # about 500K token ids


class RenderTokeniser:
    """A `Tokeniser` that asks. Use it from one event loop."""

    def __init__(
        self,
        members: Callable[[], Sequence[str]],
        *,
        limits: RenderLimits = RenderLimits(),
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`members` gives base URLs (`http://10.0.0.7:8000`) that may be asked now, in any order;
        `model` is sent along where set; `headers` go with every call; `tls` is for https members."""
        self._members = members
        self._limits = limits
        self._model = model
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"} | dict(
            headers or {}
        )
        self._tls = tls
        self._clock = clock
        self._breakers: dict[str, CircuitBreaker] = {}
        self._turn = 0
        self._in_flight = 0
        self._session: aiohttp.ClientSession | None = None
        self._counters = TokeniserCounters()

    @property
    def counters(self) -> TokeniserCounters:
        """`outcomes`: "rendered", "given", "late", "overloaded", "too_large", "unwritable" (see
        `render_call`), "multimodal_off" (see `RenderLimits`), "no_member" (none known, or all breakers open),
        "refused" (the engine's own 400), and reasons of `RenderFault`."""
        return self._counters

    @property
    def open_breakers(self) -> int:
        return sum(breaker.is_open for breaker in self._breakers.values())

    async def token_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """See `Tokeniser`."""
        if isinstance(prompt, TokenPrompt):
            return self.token_ids_at_once(prompt)
        ids, outcome = await self._bounded(prompt)
        self._counters.outcomes[outcome] += 1
        if ids is not None:
            self._counters.encoded_tokens += len(ids)
        return ids

    def answers_at_once(self, prompt: Prompt, size_bytes: int) -> bool:
        """See `Tokeniser`: only what came as tokens."""
        return isinstance(prompt, TokenPrompt)

    def token_ids_at_once(self, prompt: Prompt) -> Sequence[int] | None:
        """See `Tokeniser`."""
        assert isinstance(prompt, TokenPrompt)
        self._counters.outcomes["given"] += 1
        return prompt.token_ids

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _bounded(self, prompt: TextPrompt | ChatPrompt) -> tuple[array[int] | None, str]:
        if self._in_flight >= self._limits.max_in_flight:
            return None, "overloaded"
        has_items = isinstance(prompt, ChatPrompt) and bool(prompt.items)
        budget_s = self._limits.items_budget_s if has_items else self._limits.budget_s
        if budget_s is None:
            return None, "multimodal_off"
        try:
            path, body = render_call(prompt, self._model)
        except Unwritable:
            return None, "unwritable"
        if len(body) > self._limits.max_body_bytes:
            return None, "too_large"
        self._in_flight += 1
        try:
            return await self._ask(path, body, budget_s)
        finally:
            self._in_flight -= 1

    async def _ask(self, path: str, body: bytes, budget_s: float) -> tuple[array[int] | None, str]:
        """Ask members until one has an answer or the budget is spent. Only a member's own fault leads to
        the next one; a client that leaves is nobody's fault."""
        outcome, asked = "no_member", set[str]()
        deadline_s = asyncio.get_running_loop().time() + budget_s
        for _ in range(_ATTEMPTS):
            member = self._choose(asked)
            if member is None:
                break
            asked.add(member)
            breaker = self._breakers[member]
            try:
                async with asyncio.timeout_at(deadline_s):
                    ids = await self._call(member + path, body)
            except TimeoutError:
                self._failed(member, breaker, "late")
                return None, "late"
            except RenderFault as fault:
                outcome = fault.reason
                self._failed(member, breaker, outcome)
            else:
                breaker.succeeded()
                return ids, "refused" if ids is None else "rendered"
        return None, outcome

    def _choose(self, asked: set[str]) -> str | None:
        """The next member in turn that was not asked yet and whose breaker lets a call through."""
        members, now_s = self._members(), self._clock()
        for _ in range(len(members)):
            self._turn += 1
            member = members[self._turn % len(members)]
            if member in asked:
                continue
            if len(self._breakers) >= MAX_MEMBERS and member not in self._breakers:
                self._breakers.clear()
            if self._breakers.setdefault(member, CircuitBreaker()).admits(now_s):
                return member
        return None

    def _failed(self, member: str, breaker: CircuitBreaker, reason: str) -> None:
        was_open = breaker.is_open
        breaker.failed(self._clock())
        if breaker.is_open and not was_open:
            _log.warning("render back end %s is left alone for a while: %s", member, reason)

    async def _call(self, url: str, body: bytes) -> array[int] | None:
        """One call; None: the engine refuses this request.

        Raises:
            RenderFault: the member is at fault.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=self._tls if self._tls is not None else True
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),  # the budget is ours
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        try:
            async with self._session.post(
                url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                if response.status in (400, 413, 422):
                    return None
                if response.status != 200:
                    raise RenderFault(_status_reason(response.status))
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise RenderFault("answer_encoding")
                answer = await self._read(response)
        except (aiohttp.ClientError, OSError) as error:
            raise RenderFault("connection") from error
        return read_token_ids(answer)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The answer, if it is no larger than allowed. A connection with unread bytes is not used again."""
        parts, size_bytes = [], 0
        async for part in response.content.iter_chunked(_READ_BYTES):
            size_bytes += len(part)
            if size_bytes > self._limits.max_answer_bytes:
                response.close()
                raise RenderFault("answer_size")
            parts.append(part)
        return b"".join(parts)


def _status_reason(status: int) -> str:
    if status in (401, 403):
        return "forbidden"  # wrong key, or the server runs without --enable-scale-out
    if status in (404, 405, 501):
        return "no_render_endpoint"
    return "status_5xx" if status >= 500 else "status"
