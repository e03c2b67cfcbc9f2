"""The legs of one request: which calls go out, in which order, and what ends them.

`offloading`: both legs at once; the decode answer is held back until the prefill leg has succeeded
or the decode engine has produced a byte, so that a failed prefill can still be repaired unseen.
`nixlv2`: prefill first, its answer's kv_transfer_params into the decode leg.
A prefill leg that fails while nothing has reached the client: the decode leg is cancelled at once,
other attempts follow if allowed, then the written policy (`local`: the own engine alone; `error`:
the prefill's error). Every path cancels what it leaves behind and waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict

from sidecar import kv_params, wire
from sidecar.answer_edit import UsageEdit
from sidecar.endpoint import HostPort
from sidecar.errors import PrefillParamsInvalid, UpstreamDied, UpstreamError, UpstreamGarbage, UpstreamTimeout
from sidecar.kv_params import Api
from sidecar.nixl_params import Hosts, check_prefill_params
from sidecar.plan import Connector, Peer, PrefillDecode
from sidecar.relay import ClientStream
from sidecar.telemetry import Telemetry
from sidecar.upstream import Call, Upstream, read_bounded
from sidecar.usage import Usage, read_usage

_log = logging.getLogger(__name__)

_RETRYABLE: Final = frozenset({502, 503, 504})
_MAX_ATTEMPTS: Final = 8
_WARN_EVERY_S: Final = 10.0
_USAGE_WAIT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class LegRules:
    """What of the configuration decides about legs."""

    connector: Connector
    prefill_max_retries: int
    prefill_retry_backoff_s: float
    prefill_failure_local: bool
    prefill_timeout_s: float
    idle_timeout_s: float
    max_answer_bytes: int


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """What both legs are made of."""

    plan: PrefillDecode
    api: Api
    engine: HostPort
    target: str
    headers: CIMultiDict[str]
    raw: bytes  # the client's body without kv_transfer_params of its own
    body: Mapping[str, Any]  # the same, parsed


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A prefill answer, whole."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


class PrefillFailed(Exception):
    """A prefill leg failed and nothing has reached the client."""

    def __init__(self, cause: UpstreamError | StoredAnswer) -> None:
        super().__init__("prefill failed")
        self.cause = cause

    @property
    def reason(self) -> str:
        """For metrics: from a fixed set."""
        if isinstance(self.cause, UpstreamError):
            return self.cause.reason
        return f"status_{self.cause.status // 100}xx"

    @property
    def retryable(self) -> bool:
        """Whether another attempt may go better (the same codes as the reference)."""
        return isinstance(self.cause, UpstreamError) or self.cause.status in _RETRYABLE


@dataclass(slots=True)
class _Opened:
    """A decode answer whose first piece is here (empty: no body)."""

    answer: aiohttp.ClientResponse
    first: bytes


class SplitLegs:
    """Runs prefill/decode requests. `sign_leg` gives the headers a peer's sidecar asks of a leg."""

    def __init__(
        self,
        engine: Upstream,
        peers: Upstream,
        rules: LegRules,
        hosts: Hosts,
        telemetry: Telemetry,
        sign_leg: Callable[[str, HostPort], Mapping[str, str]],
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._rules = rules
        self._hosts = hosts
        self._telemetry = telemetry
        self._sign_leg = sign_leg
        self._warned_s = float("-inf")

    async def run(self, request: SplitRequest, client: ClientStream) -> None:
        """Serve the request.

        Raises:
            UpstreamError: no engine answered (nothing has reached the client).
            StreamBroken, ConnectionError: as `ClientStream.relay`.
        """
        prefillers = request.plan.prefillers
        attempts = min(_MAX_ATTEMPTS, max(1 + self._rules.prefill_max_retries, len(prefillers)))
        run = self._concurrent if self._rules.connector is Connector.OFFLOADING else self._serial
        for attempt in range(attempts):
            try:
                await run(request, prefillers[attempt % len(prefillers)], client)
                return
            except PrefillFailed as failure:
                last = failure
            if not last.retryable or attempt == attempts - 1:
                break
            self._telemetry.retried("prefill")
            await asyncio.sleep(self._rules.prefill_retry_backoff_s)
        await self._without_prefill(request, client, last)

    # --- one attempt ---------------------------------------------------------------------------

    async def _concurrent(self, request: SplitRequest, prefiller: Peer, client: ClientStream) -> None:
        kv_request_id = request.plan.kv_request_id
        params = kv_params.offloading_prefill_params(kv_request_id, self._pull(request, prefiller))
        decode_params = kv_params.offloading_decode_params(
            kv_request_id, prefiller.serving.host, prefiller.p2p_port
        )
        prefill = asyncio.create_task(self._prefill(request, prefiller, params))
        decode = asyncio.create_task(self._open_decode(self._decode_call(request, decode_params)))
        try:
            opened = await _decode_or_failure(decode, prefill)
            edit = UsageEdit(request.api, lambda: _prefill_usage(request.api, prefill))
            await self._relay(client, opened.answer, edit, opened.first)
        finally:
            await _stop(prefill, decode)

    async def _serial(self, request: SplitRequest, prefiller: Peer, client: ClientStream) -> None:
        params = kv_params.nixl_prefill_params(self._pull(request, prefiller))
        answer = await self._prefill(request, prefiller, params, own_request_id=True)
        decode_params = kv_params.prefill_answer_params(answer.body)
        if decode_params is None:
            raise PrefillFailed(UpstreamGarbage("The prefill endpoint answered without kv_transfer_params"))
        try:
            check_prefill_params(decode_params, self._hosts)
        except PrefillParamsInvalid as error:
            raise PrefillFailed(error) from error

        async def prefill_usage() -> Usage | None:
            return read_usage(request.api, answer.body)

        async with self._engine.answer(self._decode_call(request, decode_params)) as decode:
            await self._relay(client, decode, UsageEdit(request.api, prefill_usage))

    async def _relay(
        self,
        client: ClientStream,
        answer: aiohttp.ClientResponse,
        edit: UsageEdit,
        first: bytes | None = None,
    ) -> None:
        try:
            await client.relay(answer, first, edit)
        finally:
            self._telemetry.usage_corrected(edit.corrections)

    async def _without_prefill(
        self, request: SplitRequest, client: ClientStream, failure: PrefillFailed
    ) -> None:
        """The written policy."""
        if self._rules.prefill_failure_local:
            self._telemetry.fell_back(failure.reason)
            self._warn(failure)
            async with self._engine.answer(self._decode_call(request, None, leg="local")) as answer:
                await client.relay(answer)
        elif isinstance(failure.cause, StoredAnswer):
            await client.send(failure.cause.status, failure.cause.headers, failure.cause.body)
        else:
            raise failure.cause

    def _warn(self, failure: PrefillFailed) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning("prefill leg failed (%s): served by the own engine alone", failure.reason)

    # --- single legs ---------------------------------------------------------------------------

    def _pull(self, request: SplitRequest, prefiller: Peer) -> dict[str, Any] | None:
        source = request.plan.source_for(prefiller)
        if source is None:
            return None
        self._telemetry.pull_requested("prefill")
        return kv_params.pull_params(request.plan.kv_request_id, source.serving.host, source.p2p_port)

    async def _prefill(
        self,
        request: SplitRequest,
        prefiller: Peer,
        params: Mapping[str, Any],
        *,
        own_request_id: bool = False,
    ) -> StoredAnswer:
        """One prefill leg to its end.

        Raises:
            PrefillFailed: no answer, or one that is not a success.
        """
        headers = CIMultiDict(request.headers)
        headers.popall("Accept-Encoding", None)  # the answer is read here
        if own_request_id:
            headers.popall(wire.REQUEST_ID, None)
            headers[wire.REQUEST_ID] = str(uuid.uuid4())
        headers.update(self._sign_leg(headers.get(wire.REQUEST_ID, ""), prefiller.serving))
        body = kv_params.prefill_body(request.api, request.body, params)
        call = Call("prefill", prefiller.serving, "POST", request.target, headers, body)
        try:
            async with asyncio.timeout(self._rules.prefill_timeout_s), self._peers.answer(call) as answer:
                content = await read_bounded(answer, self._rules.max_answer_bytes)
                stored = StoredAnswer(answer.status, CIMultiDict(answer.headers), content)
        except TimeoutError as error:
            limit_s = self._rules.prefill_timeout_s
            raise PrefillFailed(UpstreamTimeout(f"The prefill leg took longer than {limit_s:g} s")) from error
        except UpstreamError as error:
            raise PrefillFailed(error) from error
        if not 200 <= stored.status < 300:
            raise PrefillFailed(stored)
        return stored

    def _decode_call(
        self, request: SplitRequest, params: Mapping[str, Any] | None, leg: str = "decode"
    ) -> Call:
        body = request.raw if params is None else kv_params.with_params(request.raw, params)
        assert body is not None, "a split request's body is a JSON object"
        headers = CIMultiDict(request.headers)
        if params is not None:
            headers.popall("Accept-Encoding", None)  # its usage may have to be corrected
        return Call(leg, request.engine, "POST", request.target, headers, body)

    async def _open_decode(self, call: Call) -> _Opened:
        answer = await self._engine.open(call)
        try:
            async with asyncio.timeout(self._rules.idle_timeout_s):
                return _Opened(answer, await answer.content.readany())
        except TimeoutError as error:
            answer.close()
            raise UpstreamTimeout("The decode endpoint sent no byte of its answer in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            answer.close()
            raise UpstreamDied("The decode endpoint broke off before its first byte") from error
        except BaseException:
            answer.close()
            raise


async def _decode_or_failure(decode: asyncio.Task[_Opened], prefill: asyncio.Task[StoredAnswer]) -> _Opened:
    """The decode answer, or the failure that comes first. Cases, in the order in which they are tested:

    prefill failed, decode silent or failing   PrefillFailed: another attempt or the policy repairs it
    decode answered (any status)               pass it on; the prefill leg may still be running
    decode failed by itself                    its UpstreamError
    prefill done, decode silent                wait for decode alone
    """
    await asyncio.wait({decode, prefill}, return_when=asyncio.FIRST_COMPLETED)
    if prefill.done() and (failure := prefill.exception()) is not None:
        answered = decode.done() and decode.exception() is None and decode.result().answer.status < 500
        if not answered:
            raise failure
    return await decode


async def _prefill_usage(api: Api, prefill: asyncio.Task[StoredAnswer]) -> Usage | None:
    """What the prefill leg's answer says; its engine may hand blocks over just before it answers."""
    await asyncio.wait({prefill}, timeout=_USAGE_WAIT_S)
    if not prefill.done() or prefill.cancelled() or prefill.exception() is not None:
        return None
    return read_usage(api, prefill.result().body)


async def _stop(prefill: asyncio.Task[StoredAnswer], decode: asyncio.Task[_Opened]) -> None:
    """Cancel both legs, wait for their end, and close an answer that is still open.

    The client may leave while we wait here: the answer is closed by a callback, which no
    cancellation can skip.
    """
    prefill.cancel()
    decode.cancel()
    decode.add_done_callback(_close_answer)
    await asyncio.gather(prefill, decode, return_exceptions=True)


def _close_answer(decode: asyncio.Task[_Opened]) -> None:
    if not decode.cancelled() and decode.exception() is None:
        decode.result().answer.close()
