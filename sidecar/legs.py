"""The legs of one request: which calls go out, in which order, and what ends them.

`offloading`, `sglang`, `mooncake`: both legs at once; the decode answer is held back until the prefill
leg has succeeded or the decode engine has produced a byte, so that a failed prefill can still be
repaired unseen. `nixlv2`: prefill first, its answer's kv_transfer_params into the decode leg.
A prefill leg that fails while nothing has reached the client: the decode leg is cancelled at once,
other attempts follow if allowed, then the written policy (`local`: the own engine alone; `error`:
the prefill's error). Every path cancels what it leaves behind and waits for it. All attempts of a
request together have one deadline (docs/sidecar.md has every wait and its bound).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from multidict import CIMultiDict

from engine_plugin import wire as engine_wire
from sidecar import handoff as handoffs
from sidecar import kv_params
from sidecar.answer_edit import UsageEdit
from sidecar.bootstrap import EngineIds
from sidecar.errors import (
    PrefillParamsInvalid,
    UpstreamDied,
    UpstreamError,
    UpstreamGarbage,
    UpstreamTimeout,
)
from sidecar.handoff import Handoff
from sidecar.http.answer import Answer
from sidecar.http.client import Received
from sidecar.http.message import HttpFault, PeerIdle
from sidecar.nixl_params import Hosts, check_prefill_params
from sidecar.peer_health import PeerHealth
from sidecar.plan import Connector, Peer
from sidecar.prefill import PrefillFailed, PrefillLeg, SplitRequest, StoredAnswer
from sidecar.relay import relay, send
from sidecar.telemetry import Telemetry
from sidecar.upstream import Call, Upstream
from sidecar.usage import Usage

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS: Final = 8
_WARN_EVERY_S: Final = 10.0
_USAGE_WAIT_S: Final = 0.5
_NIXL_PREFILL: Final = {engine_wire.KV_TRANSFER_PARAMS: engine_wire.nixl_prefill_params()}
_SUSPECTED: Final = "suspected"  # reason of a fallback: no prefiller was even asked


@dataclass(frozen=True, slots=True)
class LegRules:
    """What of the configuration decides about legs."""

    connector: Connector
    prefill_max_retries: int
    prefill_retry_backoff_s: float
    prefill_failure_local: bool
    prefill_timeout_s: float  # all attempts of one request together
    bootstrap_port: int  # sglang, mooncake: of a prefiller's bootstrap server


class SplitLegs:
    """Runs prefill/decode requests."""

    def __init__(
        self,
        engine: Upstream,
        prefill: PrefillLeg,
        rules: LegRules,
        hosts: Hosts,
        health: PeerHealth,
        engine_ids: EngineIds,
        telemetry: Telemetry,
    ) -> None:
        self._engine = engine
        self._prefill = prefill
        self._rules = rules
        self._hosts = hosts
        self._health = health
        self._engine_ids = engine_ids
        self._telemetry = telemetry
        self._warned_s = float("-inf")

    async def run(self, request: SplitRequest, client: Answer) -> None:
        """Serve the request.

        Raises:
            UpstreamError: no engine answered (nothing has reached the client).
            StreamBroken, ConnectionError: as `relay.relay`.
        """
        prefillers = self._health.usable_prefillers(request.plan.prefillers)
        if not prefillers:
            if self._rules.prefill_failure_local:
                await self._local(request, client, _SUSPECTED)
                return
            prefillers = request.plan.prefillers
        failure = await self._attempts(request, prefillers, client)
        if failure is None:
            return
        if self._rules.prefill_failure_local:
            await self._local(request, client, failure.reason)
        elif isinstance(failure.cause, StoredAnswer):
            send(
                client, failure.cause.status, failure.cause.headers, failure.cause.body, failure.cause.reason
            )
        else:
            raise failure.cause

    async def _attempts(
        self, request: SplitRequest, prefillers: tuple[Peer, ...], client: Answer
    ) -> PrefillFailed | None:
        """None once the request has been served; else the last failure."""
        rules = self._rules
        attempts = min(_MAX_ATTEMPTS, max(1 + rules.prefill_max_retries, len(prefillers)))
        run = self._serial if rules.connector is Connector.NIXLV2 else self._concurrent
        ends_s = time.monotonic() + rules.prefill_timeout_s
        for attempt in range(attempts):
            left_s = ends_s - time.monotonic()
            try:
                await run(request, prefillers[attempt % len(prefillers)], client, left_s)
                return None
            except PrefillFailed as failure:
                last = failure
                self._engine_ids.forget(prefillers[attempt % len(prefillers)])
            backoff_s = rules.prefill_retry_backoff_s
            out_of_time = time.monotonic() + backoff_s >= ends_s
            if not last.retryable or attempt == attempts - 1 or out_of_time:
                break
            self._telemetry.retried("prefill")
            await asyncio.sleep(backoff_s)
        return last

    async def _local(self, request: SplitRequest, client: Answer, reason: str) -> None:
        """The own engine alone, without parameters."""
        self._telemetry.fell_back(reason)
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning("prefill leg failed (%s): served by the own engine alone", reason)
        async with self._engine.answer(self._decode_call(request, None, leg="local")) as answer:
            await relay(answer, client)

    # --- one attempt ---------------------------------------------------------------------------

    async def _concurrent(
        self, request: SplitRequest, prefiller: Peer, client: Answer, timeout_s: float
    ) -> None:
        handoff = await self._handoff(request.plan.kv_request_id, prefiller)
        prefill = asyncio.create_task(
            self._prefill.run(
                request, prefiller, handoff.prefill, timeout_s=timeout_s, headers=handoff.headers
            )
        )
        decode = asyncio.create_task(self._open_decode(self._decode_call(request, handoff.decode)))
        try:
            opened = await _decode_or_failure(decode, prefill)
            edit = UsageEdit(request.api, lambda: _usage_of(prefill))
            await self._relay(client, opened.answer, edit, opened.first)
        finally:
            await _stop(prefill, decode)

    async def _handoff(self, kv_request_id: str, prefiller: Peer) -> Handoff:
        """Raises PrefillFailed: a mooncake prefiller's engine is not known."""
        match self._rules.connector:
            case Connector.SGLANG:
                return handoffs.sglang(prefiller, self._rules.bootstrap_port)
            case Connector.MOONCAKE:
                try:
                    engine_id = await self._engine_ids.of(prefiller)
                except UpstreamError as error:
                    self._health.prefill_failed(prefiller)
                    raise PrefillFailed(error) from error
                return handoffs.mooncake(prefiller, self._engine_ids.server(prefiller), engine_id)
            case _:
                return handoffs.offloading(kv_request_id, prefiller)

    async def _serial(self, request: SplitRequest, prefiller: Peer, client: Answer, timeout_s: float) -> None:
        answer = await self._prefill.run(
            request, prefiller, _NIXL_PREFILL, timeout_s=timeout_s, own_request_id=True
        )
        decode_members = {engine_wire.KV_TRANSFER_PARAMS: self._checked(answer, prefiller)}

        async def usage() -> Usage | None:
            return answer.usage

        async with self._engine.answer(self._decode_call(request, decode_members)) as decode:
            await self._relay(client, decode, UsageEdit(request.api, usage))

    def _checked(self, answer: StoredAnswer, prefiller: Peer) -> dict[str, Any]:
        """What a nixlv2 prefill answer tells the decode engine.

        Raises:
            PrefillFailed: nothing, or what our engine must not follow.
        """
        params = kv_params.prefill_answer_params(answer.body)
        if params is None:
            raise PrefillFailed(UpstreamGarbage("The prefill endpoint answered without kv_transfer_params"))
        try:
            check_prefill_params(params, self._hosts)
        except PrefillParamsInvalid as error:
            self._health.prefill_failed(prefiller)
            raise PrefillFailed(error) from error
        return params

    async def _relay(
        self,
        client: Answer,
        answer: Received,
        edit: UsageEdit,
        first: bytes = b"",
    ) -> None:
        try:
            await relay(answer, client, edit, first)
        finally:
            self._telemetry.usage_corrected(edit.corrections)

    # --- the decode leg ------------------------------------------------------------------------

    def _decode_call(
        self, request: SplitRequest, members: Mapping[str, Any] | None, leg: str = "decode"
    ) -> Call:
        body = request.raw if members is None else kv_params.with_members(request.raw, members)
        assert body is not None, "a split request's body is a JSON object"
        headers = CIMultiDict(request.headers)
        if members is not None:
            headers.popall("Accept-Encoding", None)  # its usage may have to be corrected
        return Call(leg, request.engine, "POST", request.target, headers, body)

    async def _open_decode(self, call: Call) -> _Opened:
        answer = await self._engine.open(call)
        try:
            return _Opened(answer, await answer.body.read())
        except PeerIdle as fault:
            raise UpstreamTimeout("The decode endpoint sent no byte of its answer in time") from fault
        except HttpFault as fault:
            raise UpstreamDied("The decode endpoint broke off before its first byte") from fault
        except BaseException:
            answer.close()
            raise


@dataclass(slots=True)
class _Opened:
    """A decode answer whose first piece is here (empty: no body)."""

    answer: Received
    first: bytes


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


async def _usage_of(prefill: asyncio.Task[StoredAnswer]) -> Usage | None:
    """What the prefill leg's answer says; its engine may hand blocks over just before it answers."""
    await asyncio.wait({prefill}, timeout=_USAGE_WAIT_S)
    if not prefill.done() or prefill.cancelled() or prefill.exception() is not None:
        return None
    return prefill.result().usage


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
