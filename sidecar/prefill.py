"""The prefill leg: one call to a peer's sidecar, read to its end, and what it means if it fails."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from multidict import CIMultiDict

from engine_plugin import wire as engine_wire
from sidecar import kv_params, wire
from sidecar.endpoint import HostPort
from sidecar.errors import UpstreamError, UpstreamTimeout
from sidecar.kv_params import Api
from sidecar.peer_health import PeerHealth
from sidecar.plan import Peer, PrefillDecode
from sidecar.telemetry import Telemetry
from sidecar.upstream import Call, Upstream, read_bounded
from sidecar.usage import Usage, read_usage

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_RETRYABLE: Final = frozenset({502, 503, 504})


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
    reason: str
    headers: CIMultiDict[str]
    body: bytes
    usage: Usage | None


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


class PrefillLeg:
    """Sends prefill legs. `sign_leg` gives the headers a peer's sidecar asks of a leg."""

    def __init__(
        self,
        peers: Upstream,
        health: PeerHealth,
        telemetry: Telemetry,
        sign_leg: Callable[[str, HostPort], Mapping[str, str]],
        *,
        max_answer_bytes: int,
    ) -> None:
        self._peers = peers
        self._health = health
        self._telemetry = telemetry
        self._sign_leg = sign_leg
        self._max_answer_bytes = max_answer_bytes

    async def run(
        self,
        request: SplitRequest,
        prefiller: Peer,
        members: Mapping[str, Any],
        *,
        timeout_s: float,
        headers: Mapping[str, str] = _NO_HEADERS,
        own_request_id: bool = False,
    ) -> StoredAnswer:
        """One leg to its end; `members` are added to its body, and a pull where one is named.

        Raises:
            PrefillFailed: no answer, or one that is not a success.
        """
        source = request.plan.source_for(prefiller)
        if source is not None and self._health.allows_pull(source):
            self._telemetry.pull_requested("prefill")
            pull = kv_params.pull_params(request.plan.kv_request_id, source.serving.host, source.p2p_port)
            own = members.get(engine_wire.KV_TRANSFER_PARAMS, {})
            members = {**members, engine_wire.KV_TRANSFER_PARAMS: {**own, **pull}}
        else:
            source = None
        call = self._call(request, prefiller, members, own_request_id=own_request_id)
        call.headers.update(headers)
        try:
            answer = await self._send(call, request.api, timeout_s)
        except UpstreamError as error:
            self._health.prefill_failed(prefiller)
            raise PrefillFailed(error) from error
        if not 200 <= answer.status < 300:
            failure = PrefillFailed(answer)
            if failure.retryable:
                self._health.prefill_failed(prefiller)
            raise failure
        self._health.prefill_succeeded(prefiller)
        if source is not None:
            self._health.pull_ended("prefill", source, answer.usage)
        return answer

    def _call(
        self, request: SplitRequest, prefiller: Peer, members: Mapping[str, Any], *, own_request_id: bool
    ) -> Call:
        headers = CIMultiDict(request.headers)
        headers.popall("Accept-Encoding", None)  # the answer is read here
        if own_request_id:
            headers.popall(wire.REQUEST_ID, None)
            headers[wire.REQUEST_ID] = str(uuid.uuid4())
        headers.update(self._sign_leg(headers.get(wire.REQUEST_ID, ""), prefiller.serving))
        body = kv_params.prefill_body(request.api, request.body, members)
        return Call("prefill", prefiller.serving, "POST", request.target, headers, body)

    async def _send(self, call: Call, api: Api, timeout_s: float) -> StoredAnswer:
        try:
            async with asyncio.timeout(timeout_s), self._peers.answer(call) as answer:
                content = await read_bounded(answer, self._max_answer_bytes)
        except TimeoutError as error:
            raise UpstreamTimeout(f"The prefill leg took longer than {timeout_s:.3g} s") from error
        usage = read_usage(api, content)
        return StoredAnswer(answer.status, answer.head.reason, answer.headers, content, usage)
