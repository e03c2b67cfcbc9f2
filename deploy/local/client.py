"""A client of the gateway: OpenAI requests as SSE, with the time to the first token.

It sends what any client could send; what it learns beyond the answer comes from `handles`.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from deploy.local.errors import FleetError
from engine_plugin import wire as engine_wire
from sidecar import wire as sidecar_wire

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_TIMEOUT_S = 60.0
_DONE = b"[DONE]"


class RequestFailed(FleetError):
    """The gateway refused a request or cut its answer; the message says with what."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished SSE answer. `token_ids` is what the engine generated, where it says so."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    ttft_ms: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GatewayClient:
    """Sends requests to one base URL (the gateway, its lab listener, or one engine)."""

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, *, model: str, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._base_url = base_url
        self._session = session
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        request_id: str,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send `body` as a streaming request and read the answer to its end.

        Raises:
            RequestFailed: status other than 200, an error event, or no end marker.
        """
        payload = {
            **body,
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = {sidecar_wire.REQUEST_ID: request_id, **(headers or {})}
        reading = _Reading(request_id)
        started_s = time.perf_counter()
        try:
            async with self._session.post(
                f"{self._base_url}{path}", json=payload, headers=sent, timeout=self._timeout
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise RequestFailed(f"{request_id}: status {response.status}: {text}")
                async for data in _events(response.content):
                    reading.take(data, (time.perf_counter() - started_s) * 1e3)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailed(f"{request_id}: {str(error) or type(error).__name__}") from error
        return reading.answer()

    async def hold_open(
        self, path: str, body: Mapping[str, Any], *, request_id: str, headers: Mapping[str, str]
    ) -> None:
        """Send a request that is not streamed and wait for its end: load. Cancelling disconnects."""
        payload = {**body, "model": self._model, "stream": False}
        sent = {sidecar_wire.REQUEST_ID: request_id, **headers}
        async with self._session.post(
            f"{self._base_url}{path}",
            json=payload,
            headers=sent,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        ) as response:
            await response.read()


def kv_source_body(kv_request_id: str, host: str, port: int) -> dict[str, Any]:
    """The field by which an engine is told where to pull from (only the sidecar may send it)."""
    source = engine_wire.kv_source_params(kv_request_id, host, port)
    return {engine_wire.KV_TRANSFER_PARAMS: {engine_wire.REMOTE_KV_SOURCE: source}}


class _Reading:
    """An answer under way."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._ttft_ms: float | None = None
        self._usage: Mapping[str, Any] | None = None
        self._done = False

    def take(self, data: bytes, at_ms: float) -> None:
        if data == _DONE:
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"{self._request_id}: error in the stream: {event['error']}")
        if event.get("usage"):
            self._usage = event["usage"]
        for choice in event.get("choices", []):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            token_ids = choice.get("token_ids") or []
            if (text or token_ids) and self._ttft_ms is None:
                self._ttft_ms = at_ms
            self._texts.append(text)
            self._token_ids.extend(token_ids)

    def answer(self) -> Answer:
        if not self._done or self._ttft_ms is None or self._usage is None:
            raise RequestFailed(f"{self._request_id}: the answer ended early")
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            request_id=self._request_id,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            ttft_ms=self._ttft_ms,
            prompt_tokens=int(self._usage["prompt_tokens"]),
            completion_tokens=int(self._usage["completion_tokens"]),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each SSE event (one `data:` line each, as OpenAI servers send them)."""
    async for line in content:
        stripped = line.strip()
        if stripped.startswith(b"data:"):
            yield stripped[5:].strip()
