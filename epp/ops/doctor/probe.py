"""Sends requests of the doctor's own and watches what becomes of them. Every probe is a fresh random text,
so that nothing of it can be cached anywhere, and asks for one token.

It loads each engine with two prompts of some hundred tokens; with `--passive` nothing is sent.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote

from engine_plugin import wire as engine_wire
from epp.debug import token_digest
from epp.extproc import wire as extproc_wire
from epp.ops.asking import STRANGE
from epp.ops.doctor.calls import Caller, Reply
from epp.ops.doctor.facts import EngineFacts, Listed, PullFacts, RepeatFacts, TokenFacts
from epp.ops.doctor.gather import Asking, sidecar_page
from epp.ops.doctor.pages import EXTERNAL_HITS, SIDECAR_PULLS, Page, drops_of, listed, rise
from sidecar import wire as sidecar_wire
from sidecar.routing_auth import RoutingClaims, sign_routing

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_BLOCKS: Final = 24  # of a prompt that is to be found again
_MAX_WORDS: Final = 8192
_MAX_PULLS: Final = 64  # endpoints of a ring; more are left out
_REPEATS: Final = 20
_WORDS: Final = ("harbour", "ledger", "seven", "crane", "tide", "winter", "cargo", "lantern")


@dataclass(frozen=True, slots=True)
class Prober:
    """`routing_key` signs source headers as the picker would; None: they go unsigned."""

    caller: Caller
    asking: Asking
    endpoints: Sequence[Listed]
    engines: Mapping[str, EngineFacts]
    routing_key: bytes | None = field(default=None, repr=False)
    request_timeout_s: float = 30.0
    settle_s: float = 5.0  # longest until the picker has heard of what an engine computed

    # --- tokens ---------------------------------------------------------------------------------
    async def tokens(self) -> tuple[TokenFacts, ...]:
        """Both APIs on every engine that serves."""
        forms: tuple[tuple[str, dict[str, Any]], ...]
        forms = ((_COMPLETIONS, {"prompt": _text(40)}), (_CHAT, {"messages": _chat(_text(40))}))
        every = itertools.product(self.asking.urls, self._serving(), forms)
        found = [self._compare(url, row, path, text) for url, row, (path, text) in every]
        return tuple(await asyncio.gather(*found))

    async def _compare(self, url: str, row: Listed, path: str, text: Mapping[str, Any]) -> TokenFacts:
        body = {**text, "model": self._model(row)}
        picker_url = f"{url}/debug/kvpull/tokens?path={quote(path)}"
        theirs, ours = await asyncio.gather(
            self.caller.post(f"http://{row.address}/tokenize", body),
            self.caller.post(picker_url, body, self.asking.authorization),
        )
        fact = TokenFacts(url, row.name, path, None, None, equal=False)
        try:
            ids = [int(token) for token in theirs.json()["tokens"]] if theirs.good else None
            said = dict(ours.json()) if ours.good else None
        except STRANGE:
            return replace(fact, fault="an answer that is no list of tokens")
        if ids is None:  # a model without a chat template has no tokens of a chat
            return replace(fact, fault=f"/tokenize: {theirs.why}")
        if said is None or said["count"] is None:
            why = "it cannot tell the tokens of a text" if said else f"its tokens page: {ours.why}"
            return replace(fact, fault=why, picker_fault=True)
        equal = said["sha256"] == token_digest(ids)
        return replace(fact, engine_count=len(ids), picker_count=int(said["count"]), equal=equal)

    # --- scores ---------------------------------------------------------------------------------
    async def repeat(self, gateway: str) -> RepeatFacts:
        """One prompt through the gateway until an endpoint scores for it, or the settling time is over."""
        rows = self._serving()
        body = self._body(rows[0] if rows else None, _prompt_for(self.endpoints))
        first = await self._through(gateway, body)
        if isinstance(first, RepeatFacts):
            return first
        computing, deadline_s, repeats, best, record = str(first["computing"]), self._deadline(), 0, 0, first
        # of an endpoint without a claim nothing can be known: one repetition shows it
        limit = _REPEATS if computing in {row.name for row in rows if row.has_claim} else 1
        while best == 0 and repeats < limit and (repeats == 0 or time.monotonic() < deadline_s):
            await asyncio.sleep(self.settle_s / _REPEATS)
            again = await self._through(gateway, body)
            if isinstance(again, RepeatFacts):
                return again
            record, repeats = again, repeats + 1
            best = max((int(row["cached_tokens"]) for row in record["candidates"]), default=0)
        return RepeatFacts(
            gateway,
            prompt_tokens=record["prompt_tokens"],
            best_cached_tokens=best,
            reason=str(record["reason"]),
            computing=computing,
            repeats=repeats,
        )

    async def _through(self, gateway: str, body: Mapping[str, Any]) -> dict[str, Any] | RepeatFacts:
        """The decision about one request, or why there is none."""
        request_id = f"doctor-{uuid.uuid4().hex}"
        headers = {sidecar_wire.REQUEST_ID: request_id}
        reply = await self.caller.post(
            gateway + _COMPLETIONS, body, headers, timeout_s=self.request_timeout_s
        )
        if not reply.good:
            taken = reply.timed_out or reply.status >= 500
            return RepeatFacts(gateway, fault=f"a request through it: {reply.why}", taken=taken)
        for url in self.asking.urls:
            found = await self.caller.get(
                f"{url}/debug/kvpull/decisions/{request_id}", self.asking.authorization
            )
            record = found.json() if found.good else None
            if isinstance(record, dict) and {"computing", "candidates", "prompt_tokens"} <= record.keys():
                return record
        return RepeatFacts(gateway, fault="it answered, and no picker given has decided about the request")

    # --- pulls ----------------------------------------------------------------------------------
    async def pulls(self) -> tuple[PullFacts, ...]:
        """Every endpoint as a source and as a destination: a ring. One after the other, so that counters
        speak of one pull."""
        ring = self._serving()[:_MAX_PULLS]
        if len(ring) < 2:
            return ()
        bodies = {row.name: self._body(row, _prompt_for(self.endpoints)) for row in ring}
        before = {row.name: row.cpu_blocks for row in await self._listed()}
        primed = await asyncio.gather(*(self._prime(row, bodies[row.name]) for row in ring))
        grown = await self._until_announced(ring, before)
        found = []
        for n, source in enumerate(ring):
            destination = ring[(n + 1) % len(ring)]
            fact = PullFacts(source.name, destination.name, fault=primed[n], primed=source.name in grown)
            if fact.fault is None:
                fact = await self._pull(source, destination, bodies[source.name], fact.primed)
            found.append(fact)
        return tuple(found)

    async def _prime(self, row: Listed, body: Mapping[str, Any]) -> str | None:
        """Let `row` compute a prompt; why it did not."""
        reply = await self._direct(row, body, None)
        return None if reply.good else reply.why

    async def _until_announced(self, ring: Sequence[Listed], before: Mapping[str, int]) -> set[str]:
        """Endpoints of which the picker has heard that their CPU tier has grown."""
        waiting = {row.name for row in ring if row.has_claim}
        deadline_s, grown = self._deadline(), set[str]()
        while not waiting <= grown and time.monotonic() < deadline_s:
            await asyncio.sleep(self.settle_s / 50)
            grown |= {row.name for row in await self._listed() if row.cpu_blocks > before.get(row.name, 0)}
        return grown

    async def _pull(
        self, source: Listed, destination: Listed, body: Mapping[str, Any], primed: bool
    ) -> PullFacts:
        before = await self._counters(source, destination)
        reply = await self._direct(destination, body, source)
        after = await self._counters(source, destination)
        for _ in range(10):  # the two ends count a moment apart
            if not reply.good or after.rise_of("served", before) == after.rise_of("received", before):
                break
            await asyncio.sleep(0.05)
            after = await self._counters(source, destination)
        usage = _usage(reply)
        return PullFacts(
            source.name,
            destination.name,
            fault=None if reply.good else reply.why,
            primed=primed,
            sidecar_pulls=after.rise_of("sidecar_pulls", before),
            sidecar_drops=rise(before.drops, after.drops),
            engine_pulls=None if after.pulls is None else rise(before.pulls or {}, after.pulls),
            received_bytes=after.rise_of("received", before),
            served_bytes=after.rise_of("served", before),
            external_tokens=after.rise_of("external", before),
            prompt_tokens=usage.get("prompt_tokens"),
        )

    async def _counters(self, source: Listed, destination: Listed) -> _Counters:
        own, peer, sidecar = await asyncio.gather(
            self.caller.get(f"http://{destination.address}/metrics"),
            self.caller.get(f"http://{source.address}/metrics"),
            sidecar_page(self.caller, self.asking, destination),
        )
        page, peer_page = Page(own.text if own.good else ""), Page(peer.text if peer.good else "")
        ours = engine_wire.ENGINE_INFO in page.names
        return _Counters(
            pulls=page.by(engine_wire.PULLS_TOTAL, "reason") if ours else None,
            received=_or_zero(page.total(engine_wire.PULL_RECEIVED_BYTES_TOTAL), ours),
            served=_or_zero(
                peer_page.total(engine_wire.PULL_SERVED_BYTES_TOTAL),
                engine_wire.ENGINE_INFO in peer_page.names,
            ),
            external=page.total(EXTERNAL_HITS),
            sidecar_pulls=None if sidecar is None else sidecar[0].total(SIDECAR_PULLS) or 0.0,
            drops={} if sidecar is None else drops_of(sidecar[0]),
        )

    async def _direct(self, row: Listed, body: Mapping[str, Any], source: Listed | None) -> Reply:
        """A request to an endpoint's serving address with the headers that a picker would have set."""
        headers = {
            sidecar_wire.REQUEST_ID: f"doctor-{uuid.uuid4().hex}",
            extproc_wire.DESTINATION: row.address,
            sidecar_wire.DECISION_ID: str(uuid.uuid4()),
        }
        if source is not None:
            headers[sidecar_wire.KV_CACHE_SOURCE_HOST_PORT] = source.address
        if self.routing_key is not None:
            named = source.address if source else ""
            claims = RoutingClaims(headers[sidecar_wire.REQUEST_ID], row.address, source=named)
            signature = sign_routing(self.routing_key, claims, now_s=time.time())
            headers[sidecar_wire.ROUTING_AUTH] = signature
        url = f"http://{row.address}{_COMPLETIONS}"
        return await self.caller.post(url, body, headers, timeout_s=self.request_timeout_s)

    # --- helpers --------------------------------------------------------------------------------
    def _serving(self) -> list[Listed]:
        return [row for row in self.endpoints if not row.draining and self.engines[row.name].fault is None]

    def _model(self, row: Listed | None) -> str:
        names = [self.engines[row.name].model] if row else []
        return next((name for name in (*names, self.asking.model) if name), "")

    def _body(self, row: Listed | None, prompt: str) -> dict[str, Any]:
        return {"model": self._model(row), "prompt": prompt, "max_tokens": 1, "temperature": 0}

    def _deadline(self) -> float:
        return time.monotonic() + self.settle_s

    async def _listed(self) -> tuple[Listed, ...]:
        url = f"{self.asking.urls[0]}/debug/kvpull/endpoints"
        reply = await self.caller.get(url, self.asking.authorization)
        try:
            return tuple(listed(reply.json())) if reply.good else ()
        except STRANGE:
            return ()


@dataclass(frozen=True, slots=True)
class _Counters:
    """Of one pair at one moment; None: not counted there."""

    pulls: Mapping[str, float] | None
    received: float | None
    served: float | None
    external: float | None
    sidecar_pulls: float | None
    drops: Mapping[str, float]

    def rise_of(self, name: str, before: _Counters) -> float | None:
        """Of one counter; None where one of the two readings has none."""
        earlier, later = getattr(before, name), getattr(self, name)
        return None if earlier is None or later is None else later - earlier


def _prompt_for(endpoints: Sequence[Listed]) -> str:
    """Long enough for `_BLOCKS` blocks of the largest block size (a word is a token or more)."""
    sizes = [row.block_size_tokens for row in endpoints if row.block_size_tokens]
    return _text(min(_BLOCKS * max(sizes, default=16), _MAX_WORDS))


def _text(words: int) -> str:
    """No two have a first block in common."""
    return " ".join((secrets.token_hex(16), *(secrets.choice(_WORDS) for _ in range(words))))


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _usage(reply: Reply) -> Mapping[str, Any]:
    body = reply.json() if reply.good else None
    usage = body.get("usage") if isinstance(body, dict) else None
    return usage if isinstance(usage, dict) else {}


def _or_zero(value: float | None, counted: bool) -> float | None:
    return (value or 0.0) if counted else value
