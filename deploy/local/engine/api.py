"""The OpenAI API over HTTP: completions and chat (SSE or not), models, tokenize, health.

A client that leaves, at any moment, abandons its requests. Errors have vLLM's shape. Logs name
request ids and counts, never content.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from aiohttp import web

from deploy.local.engine.answers import SSE_END, Form, sse
from deploy.local.engine.core import Engine
from deploy.local.engine.errors import ApiError, not_found, unavailable
from deploy.local.engine.kv_params import read_as_old_engine
from deploy.local.engine.prompts import PromptReader
from deploy.local.engine.request import Request, Spec
from deploy.local.engine.scheduler import QueueFull
from deploy.local.engine.schema import Sampling, parse_chat, parse_completion

log = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "x-request-id"
MAX_BODY_BYTES: Final = 64 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenAiApi:
    """Handlers of one engine."""

    def __init__(
        self, engine: Engine, reader: PromptReader, *, model: str, old_transfer_keys: bool = False
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._model = model
        self._understand = read_as_old_engine if old_transfer_keys else _as_it_is
        self._created = int(time.time())
        self.draining = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
            web.get("/v1/models", self.models),
            web.post("/tokenize", self.tokenize),
            web.get("/health", self.health),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    # --- generation -----------------------------------------------------------------------------
    async def completions(self, http: web.Request) -> web.StreamResponse:
        call = parse_completion(self._understand(await read_json(http)))
        self._check(call.sampling)
        prompts = await self._reader.completion(call)
        return await self._answer(http, call.sampling, prompts, chat=False)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        call = parse_chat(self._understand(await read_json(http)))
        self._check(call.sampling)
        return await self._answer(http, call.sampling, [await self._reader.chat(call)], chat=True)

    def _check(self, sampling: Sampling) -> None:
        if self.draining:
            raise unavailable("the engine is shutting down")
        if sampling.model not in (None, self._model):
            raise not_found(f"The model `{sampling.model}` does not exist.", param="model")

    async def _answer(
        self, http: web.Request, sampling: Sampling, prompts: Sequence[tuple[int, ...]], *, chat: bool
    ) -> web.StreamResponse:
        request_id = http.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
        specs = [self._spec(sampling, ids, _numbered(request_id, i)) for i, ids in enumerate(prompts)]
        form = Form(chat, f"{'chatcmpl' if chat else 'cmpl'}-{request_id}", self._model, int(time.time()))
        requests: list[Request] = []
        try:
            for spec in specs:
                requests.append(await self._engine.submit(spec))
            if sampling.stream:
                return await self._stream(http, form, requests, sampling.include_usage)
            texts = await asyncio.gather(*(self._text(request) for request in requests))
            return web.json_response(form.whole(requests, texts), headers={REQUEST_ID_HEADER: request_id})
        except QueueFull as error:
            raise unavailable(str(error)) from error
        finally:
            for request in requests:
                self._engine.abandon(request)
            log.info("request %s: %d prompt(s), %s", request_id, len(prompts), _summary(requests))

    def _spec(self, sampling: Sampling, ids: tuple[int, ...], request_id: str) -> Spec:
        longest = self._reader.answer_tokens(len(ids), sampling.max_tokens)
        return Spec(
            request_id=request_id,
            prompt=ids,
            max_tokens=1 if sampling.transfer.is_prefill_leg else longest,
            stops_early=sampling.max_tokens is None,
            salt=sampling.salt,
            transfer=sampling.transfer,
        )

    async def _text(self, request: Request) -> str:
        await request.ended.wait()
        return self._reader.detokenizer().add(request.output)

    async def _stream(
        self, http: web.Request, form: Form, requests: list[Request], include_usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"cache-control": "no-cache"})
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        try:
            await response.prepare(http)
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(self._stream_one(response, form, index, request))
            if include_usage:
                await response.write(sse(form.closing(requests)))
            await response.write(SSE_END)
            await response.write_eof()
        except* ConnectionError:
            log.debug("%s: the client left in mid stream", form.answer_id)
        return response

    async def _stream_one(
        self, response: web.StreamResponse, form: Form, index: int, request: Request
    ) -> None:
        detokenizer = self._reader.detokenizer()
        seen = 0
        while ids := await request.more(seen):
            if seen == 0 and (opening := form.opening(index)):
                await response.write(sse(opening))
            seen += len(ids)
            ended = request.finished and seen == request.report.output_tokens
            reason = request.finish_reason if ended else None
            await response.write(sse(form.piece(index, detokenizer.add(ids), reason)))
            if ended:
                return
        await response.write(sse(form.piece(index, "", request.finish_reason)))

    # --- the rest -------------------------------------------------------------------------------
    async def models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._model,
            "parent": None,
            "max_model_len": self._reader.max_model_len,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def tokenize(self, http: web.Request) -> web.Response:
        body = await read_json(http)
        if "messages" in body:
            tokens: Sequence[int] = await self._reader.chat(parse_chat(body))
        else:
            text = body.get("prompt")
            if not isinstance(text, str):
                raise ApiError("prompt must be text", param="prompt")
            special = body.get("add_special_tokens", True) is not False
            tokens = await asyncio.to_thread(self._reader.tokenize, text, special)
        found = {"count": len(tokens), "max_model_len": self._reader.max_model_len, "tokens": list(tokens)}
        return web.json_response(found | {"token_strs": None})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.draining else 200)

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        external = http.query.get("reset_external", "false").lower() in ("1", "true")
        self._engine.reset_prefix_cache(external=external)
        return web.Response()


def _as_it_is(body: dict[str, Any]) -> dict[str, Any]:
    return body


def _numbered(request_id: str, index: int) -> str:
    return request_id if index == 0 else f"{request_id}-{index}"


def _summary(requests: list[Request]) -> str:
    reports = [request.report for request in requests]
    total = {
        "prompt": sum(r.prompt_tokens for r in reports),
        "cached": sum(r.cached_tokens for r in reports),
        "pulled": sum(r.pulled_tokens + r.handed_over_tokens for r in reports),
        "output": sum(r.output_tokens for r in reports),
    }
    reason = next((r.pull_reason for r in reports if r.pull_reason), "none")
    return " ".join(f"{name}={count}" for name, count in total.items()) + f" pull={reason}"


async def read_json(http: web.Request) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError, which never repeats the body."""
    if http.content_type not in ("application/json", "application/octet-stream"):
        raise ApiError("Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request")
    try:
        body = json.loads(await http.read())
    except (ValueError, RecursionError) as error:
        raise ApiError("the body is not valid JSON", kind="Bad Request") from error
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object", kind="Bad Request")
    return body


@web.middleware
async def error_shapes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Request boundary: every refusal and every fault gets the API's error shape."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.as_json(), status=error.status)
    except web.HTTPException as error:
        refusal = ApiError(error.reason, status=error.status, kind=type(error).__name__)
        return web.json_response(refusal.as_json(), status=error.status)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        fault = ApiError("internal error", status=500, kind="InternalServerError")
        return web.json_response(fault.as_json(), status=500)
