"""Asks one engine: a completion of one token, timed to its first byte of text, and its counters.

Blocking and one at a time: nothing else may run on the pair, and nothing in this process shall disturb the
clock. Prompts are random token ids; neither they nor the salts are ever shown.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from engine_plugin import wire
from engine_plugin.identity import format_address

_MAX_PAGE_BYTES: Final = 16 << 20
_MAX_LINE_BYTES: Final = 1 << 20
_OK: Final = "ok"  # the `reason` of a pull that did not fail
_EXTERNAL_HITS: Final = "vllm:external_prefix_cache_hits_total"


class ProbeError(RuntimeError):
    """An engine did not do what a calibration needs. The message names the engine."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine has counted since it started; None: it does not count that."""

    received_bytes: float | None
    served_bytes: float | None
    external_tokens: float | None
    info: Mapping[str, str]  # labels of kvpull_engine_info; empty without our plugin
    failed_pulls: Mapping[str, float] = field(default_factory=dict)  # by the engine's reason


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer: ms to its first text, and the cached tokens that the engine counted (None: it does not)."""

    ms: float
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class SourceName:
    """Where blocks may be pulled from, as the engine's control channel is reached."""

    host: str
    port: int

    def params(self) -> dict[str, Any]:
        return {wire.REMOTE_KV_SOURCE: wire.kv_source_params(secrets.token_hex(8), self.host, self.port)}

    def __str__(self) -> str:
        return format_address((self.host, self.port))


class Engine:
    """One engine by its URL: `http[s]://host:port`, its own port or its sidecar's."""

    def __init__(self, url: str, *, model: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ProbeError(f"{url!r}: expected http://host:port")
        self.url = url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._timeout_s = timeout_s
        self._model = model

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)

    def _get(self, path: str) -> bytes:
        with contextlib.closing(self._connection()) as connection, self._failing(path):
            connection.request("GET", path)
            answer = connection.getresponse()
            page = answer.read(_MAX_PAGE_BYTES)
            if answer.status != 200:
                raise ProbeError(f"{self.url}{path}: status {answer.status}")
            return page

    @contextlib.contextmanager
    def _failing(self, path: str) -> Any:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise ProbeError(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    def counters(self) -> Counters:
        """Raises ProbeError."""
        sums: dict[str, float] = {}
        info: Mapping[str, str] = {}
        failed: dict[str, float] = {}
        names = (wire.PULL_RECEIVED_BYTES_TOTAL, wire.PULL_SERVED_BYTES_TOTAL, _EXTERNAL_HITS)
        try:
            for family in text_string_to_metric_families(self._get("/metrics").decode()):
                for sample in family.samples:
                    if sample.name == wire.ENGINE_INFO:
                        info = sample.labels
                    elif sample.name == wire.PULLS_TOTAL and (reason := sample.labels.get("reason")) != _OK:
                        failed[str(reason)] = sample.value
                    elif sample.name in names:
                        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        except ValueError as error:
            raise ProbeError(f"{self.url}/metrics: not a metrics page") from error
        absent = 0.0 if info else None  # a labelled counter appears with its first pull
        return Counters(
            sums.get(names[0], absent), sums.get(names[1], absent), sums.get(_EXTERNAL_HITS), info, failed
        )

    def model(self) -> str:
        """The first model it serves, unless one was named. Raises ProbeError."""
        if self._model is None:
            try:
                self._model = str(json.loads(self._get("/v1/models"))["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ProbeError(f"{self.url}/v1/models: no model is named there; use --model") from error
        return self._model

    def complete(self, tokens: Sequence[int], salt: str, source: SourceName | None = None) -> Timed:
        """One token after `tokens`. Raises ProbeError."""
        body: dict[str, Any] = {
            "model": self.model(),
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if source is not None:
            body[wire.KV_TRANSFER_PARAMS] = source.params()
        payload = json.dumps(body).encode()
        path = "/v1/completions"
        with contextlib.closing(self._connection()) as connection, self._failing(path):
            connection.connect()
            started_s = time.perf_counter()
            connection.request("POST", path, payload, {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ProbeError(f"{self.url}{path}: status {answer.status}")
            return self._read(answer, started_s)

    def _read(self, answer: http.client.HTTPResponse, started_s: float) -> Timed:
        first_ms: float | None = None
        cached_tokens: int | None = None
        while line := answer.readline(_MAX_LINE_BYTES):
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now_s = time.perf_counter()
            try:
                event = json.loads(line[6:])
                if event["choices"] and first_ms is None:
                    first_ms = (now_s - started_s) * 1e3
                details = (event.get("usage") or {}).get("prompt_tokens_details")
                if details is not None:
                    cached_tokens = int(details["cached_tokens"])
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ProbeError(f"{self.url}: an event of the answer's stream cannot be read") from error
        if first_ms is None:
            raise ProbeError(f"{self.url}: the answer ended without text")
        return Timed(first_ms, cached_tokens)
