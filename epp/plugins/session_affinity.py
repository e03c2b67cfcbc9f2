"""`session-affinity-filter` and `-scorer`: a session stays on its endpoint. Semantics: llm-d-router at
ebab687.

Two ways to know it. `encoded_endpoint_header`: the answer carries the endpoint's name in a header, the
client sends it back; nothing is remembered here. `session_id`: a header, cookie or attribute names the
session; where it went is remembered for `evictionTtlSeconds` after its last request, and at most for
`MAX_SESSIONS` of them. A name that is not among the candidates binds to nobody.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from pydantic import Field, model_validator

from engine_plugin.identity import EndpointId
from epp.core.types import Candidate, ScheduleContext
from epp.plugins.parameters import HeaderName, Parameters
from epp.plugins.plugin_type import HeaderSource, Inputs, Kind, PluginType

MAX_SESSIONS = 1 << 16
SESSION_TOKEN_HEADER = "x-session-token"  # a header's name
SESSION_ID_HEADER = "x-session-id"


class SessionIdSource(Parameters):
    """One of them."""

    header: HeaderName | None = None
    attribute: str | None = None  # of a session-id-producer or agent-identity
    producer: str | None = None  # whose attribute it is: there is one producer of each

    @model_validator(mode="after")
    def _one(self) -> SessionIdSource:
        if (self.header is None) == (self.attribute is None):
            raise ValueError("give either header or attribute")
        return self


class SessionIdConfig(Parameters):
    sources: list[SessionIdSource] = Field(
        default_factory=lambda: [SessionIdSource(header=SESSION_ID_HEADER)]
    )
    eviction_ttl_seconds: float = Field(default=300.0, gt=0.0, le=86_400.0 * 30)
    eviction_sweep_seconds: float = Field(default=10.0, gt=0.0)  # entries go as soon as they are looked at


class EncodedEndpointHeaderConfig(Parameters):
    header: HeaderName = SESSION_TOKEN_HEADER


class SessionAffinityParameters(Parameters):
    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    header_name: HeaderName | None = None  # older spelling of encodedEndpointHeaderConfig.header
    encoded_endpoint_header_config: EncodedEndpointHeaderConfig = Field(
        default_factory=EncodedEndpointHeaderConfig
    )
    session_id_config: SessionIdConfig = Field(default_factory=SessionIdConfig)
    profile_name: str | None = None  # whose winner a session is bound to; absent: the primary profile's


class Binding(Protocol):
    """Where a session is bound to, by either strategy."""

    @property
    def header_names(self) -> frozenset[str]: ...

    def endpoint(self, context: ScheduleContext) -> str | None:
        """The endpoint's name; None: not bound."""
        ...

    def bind(self, context: ScheduleContext, endpoint: EndpointId) -> Mapping[str, str]:
        """Remember; returns headers for the client."""
        ...


class EncodedEndpoint:
    """The client carries it."""

    def __init__(self, header: str) -> None:
        self._header = header

    @property
    def header_names(self) -> frozenset[str]:
        return frozenset({self._header})

    def endpoint(self, context: ScheduleContext) -> str | None:
        value = context.request.headers.get(self._header)
        try:
            return base64.b64decode(value, validate=True).decode() if value else None
        except (binascii.Error, ValueError):  # what a client sends is no error of ours
            return None

    def bind(self, context: ScheduleContext, endpoint: EndpointId) -> Mapping[str, str]:
        return {self._header: base64.b64encode(str(endpoint).encode()).decode()}


class SessionTable:
    """We remember it. `len` is the number of sessions; overdue ones go with the next request."""

    def __init__(self, sources: Sequence[HeaderSource], ttl_s: float) -> None:
        self._sources = tuple(sources)
        self._ttl_s = ttl_s
        self._bound: OrderedDict[str, tuple[str, float]] = OrderedDict()  # last used last

    def __len__(self) -> int:
        return len(self._bound)

    @property
    def header_names(self) -> frozenset[str]:
        return frozenset(source.header for source in self._sources)

    def _session(self, context: ScheduleContext) -> str | None:
        headers = context.request.headers
        return next((value for source in self._sources if (value := source.read(headers))), None)

    def endpoint(self, context: ScheduleContext) -> str | None:
        found = self._bound.get(self._session(context) or "")
        return found[0] if found is not None and context.now_s < found[1] else None

    def bind(self, context: ScheduleContext, endpoint: EndpointId) -> Mapping[str, str]:
        session = self._session(context)
        if session is not None:
            self._bound[session] = (str(endpoint), context.now_s + self._ttl_s)
            self._bound.move_to_end(session)
        while self._bound:
            oldest = next(iter(self._bound))
            if len(self._bound) <= MAX_SESSIONS and context.now_s < self._bound[oldest][1]:
                break
            del self._bound[oldest]
        return {}


class SessionAffinity:
    """Filter: the bound endpoint alone where it is a candidate, else everybody. Scorer: 1 for it, else 0."""

    def __init__(self, name: str, binding: Binding, profile_name: str | None = None) -> None:
        self.name = name
        self._binding = binding
        self._profile_name = profile_name

    @property
    def header_names(self) -> frozenset[str]:
        return self._binding.header_names

    def filter(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        bound = self._binding.endpoint(context)
        own = [c for c in candidates if str(c.endpoint.id) == bound] if bound is not None else ()
        return own or candidates

    def score(self, context: ScheduleContext, candidates: Sequence[Candidate]) -> Sequence[float]:
        bound = self._binding.endpoint(context)
        if bound is None:
            return [0.0] * len(candidates)
        return [1.0 if str(c.endpoint.id) == bound else 0.0 for c in candidates]

    def placed(
        self, context: ScheduleContext, candidates: Sequence[Candidate], targets: Mapping[str, Candidate]
    ) -> Mapping[str, str]:
        primary = next(iter(targets.values()))
        target = targets.get(self._profile_name or "", primary)
        return self._binding.bind(context, target.endpoint.id)


def _build(name: str, p: SessionAffinityParameters, inputs: Inputs) -> object:
    if p.strategy == "encoded_endpoint_header":
        header = p.header_name or p.encoded_endpoint_header_config.header
        return SessionAffinity(name, EncodedEndpoint(header), p.profile_name)
    table = SessionTable(
        session_sources(p.session_id_config, inputs), p.session_id_config.eviction_ttl_seconds
    )
    return SessionAffinity(name, table, p.profile_name)


def session_sources(config: SessionIdConfig, inputs: Inputs) -> tuple[HeaderSource, ...]:
    """Where a session's name is read from, in order. Raises ValueError: an attribute that nobody provides."""
    sources: list[HeaderSource] = []
    for source in config.sources:
        if source.header is not None:
            sources.append(HeaderSource(source.header))
        elif source.attribute not in inputs.attributes:
            known = ", ".join(inputs.attributes) or "none"
            raise ValueError(
                f"sessionIdConfig.sources: no plugin provides the attribute {source.attribute!r}; "
                f"provided: {known}"
            )
        else:
            sources.extend(inputs.attributes[source.attribute or ""])
    return tuple(sources)


ROWS = (
    PluginType("session-affinity-filter", Kind.FILTER, SessionAffinityParameters, _build),
    PluginType("session-affinity-scorer", Kind.SCORER, SessionAffinityParameters, _build),
)
