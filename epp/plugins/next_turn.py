"""`kvpull-next-turn-prefetcher` (experimental): parameters of `epp.core.next_turn`, and whose sessions it
sees."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from epp.core.next_turn import NextTurns, PrefetchSettings
from epp.plugins.parameters import MAX_TOKENS, DurationS, Parameters, Quantity
from epp.plugins.plugin_type import PREFIX_NEED, HeaderSource, Inputs, Kind, PluginType
from epp.plugins.session_affinity import SessionIdConfig, session_sources


class NextTurnParameters(Parameters):
    session_id_config: SessionIdConfig = Field(default_factory=SessionIdConfig)  # of it, the sources only
    min_tokens: int = Field(default=2_048, ge=1, le=MAX_TOKENS)
    orders_per_second: float = Field(default=2.0, gt=0.0, le=1e4, allow_inf_nan=False)
    bytes_per_second: Quantity = 256_000_000
    burst_bytes: Quantity = 1_000_000_000
    max_in_flight: int = Field(default=2, ge=1, le=1_024)  # orders at a time; one of a source
    deadline: DurationS = Field(default=5.0, gt=0.0, le=60.0)  # written "5s"
    bytes_per_token: Quantity = 0  # of KV, until pulls have shown it; 0: nothing is ordered before
    max_tracked_tokens: int = Field(default=4_000_000, ge=1, le=1 << 34)  # of turns that are running
    prefix_match_info_producer_name: str | None = None


class NextTurnPrefetcher:
    """What is configured; `turns` is the state, owned by the picker."""

    def __init__(self, name: str, settings: PrefetchSettings, sources: tuple[HeaderSource, ...]) -> None:
        self.name = name
        self._sources = sources
        self.turns = NextTurns(settings, self._session)

    @property
    def header_names(self) -> frozenset[str]:
        return frozenset(source.header for source in self._sources)

    def _session(self, headers: Mapping[str, str]) -> str | None:
        return next((value for source in self._sources if (value := source.read(headers))), None)


def _build(name: str, p: NextTurnParameters, inputs: Inputs) -> object:
    settings = PrefetchSettings(
        p.min_tokens,
        p.orders_per_second,
        float(p.bytes_per_second),
        float(p.burst_bytes),
        p.max_in_flight,
        p.deadline,
        float(p.bytes_per_token),
        p.max_tracked_tokens,
    )
    return NextTurnPrefetcher(name, settings, session_sources(p.session_id_config, inputs))


ROWS = (
    PluginType(
        "kvpull-next-turn-prefetcher",
        Kind.PRODUCER,
        NextTurnParameters,
        _build,
        (PREFIX_NEED,),
        experimental=True,
    ),
)
