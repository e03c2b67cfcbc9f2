"""JSON of answers: whole responses and SSE chunks of both call kinds. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deploy.local.engine.request import Request
from engine_plugin import wire

SSE_END = b"data: [DONE]\n\n"


def sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def usage(requests: list[Request]) -> dict[str, Any]:
    """Token counts of all prompts of one call."""
    prompt = sum(r.prompt_tokens for r in requests)
    completion = sum(r.report.output_tokens for r in requests)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.report.cached_tokens for r in requests)},
    }


@dataclass(frozen=True, slots=True)
class Form:
    """How one call is answered: as text completion or as chat."""

    chat: bool
    answer_id: str
    model: str
    created: int

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, requests: list[Request], texts: list[str]) -> dict[str, Any]:
        """A complete, non-streamed answer."""
        choices = [self._choice(i, r, text) for i, (r, text) in enumerate(zip(requests, texts, strict=True))]
        transfer = {wire.KV_TRANSFER_PARAMS: requests[0].kv_response}
        return self._head(chunk=False) | {"choices": choices, "usage": usage(requests)} | transfer

    def _choice(self, index: int, request: Request, text: str) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, "tool_calls": []}}
        end = {"logprobs": None, "finish_reason": request.finish_reason, "stop_reason": None}
        return {"index": index} | content | end

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first text, where the form has one."""
        if not self.chat:
            return None
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """One chunk of text; the last one carries the finish reason."""
        return self._chunk(
            index, {"delta": {"content": text}} if self.chat else {"text": text}, finish_reason
        )

    def _chunk(self, index: int, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index} | content | {"logprobs": None, "finish_reason": finish_reason}
        return self._head(chunk=True) | {"choices": [choice]}

    def closing(self, requests: list[Request]) -> dict[str, Any]:
        """The usage chunk."""
        return self._head(chunk=True) | {"choices": [], "usage": usage(requests)}
