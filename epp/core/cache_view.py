"""What the picker may claim about every engine's cache: event streams in front of one prefix index.

Life of an endpoint: `add_endpoint` -> `on_connect` (asks for a replay from 0) -> replayed and live
batches -> `on_replay_end` -> claims. A gap, an unreadable batch, a disconnect or a restart takes the
claim away until a replay has repaired the view or the view was dropped. Removing the endpoint drops
all of it.

Pure: no clock (`now_s` is an argument), no logging, no I/O. It decides nothing about placement.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_plugin.identity import EndpointId
from engine_plugin.salt import salt_forms
from epp.core.cache_match import standings
from epp.core.columns import match_rows
from epp.core.engine_agreement import HashDisagreement, differing, hash_disagreements
from epp.core.hashing import Family, InvalidTokens, PromptKeys
from epp.core.prefix_index import Depths, PrefixQuery
from epp.core.types import NO_MATCH, ClaimState, PrefixMatch, SchedulingRequest
from epp.core.view_intake import MAX_PULL_MISSES as MAX_PULL_MISSES
from epp.core.view_intake import ViewIntake
from epp.core.view_state import LookUp, View, ViewStats


class CacheView(ViewIntake):
    """Owns the index and one `EventStream` an endpoint. Calls for endpoints that were not added are
    harmless (events may still be on their way when one leaves): they change and claim nothing."""

    # --- what the picker asks -------------------------------------------------------------------

    def match(
        self, request: SchedulingRequest, endpoints: Iterable[EndpointId]
    ) -> dict[EndpointId, PrefixMatch]:
        """How much of the prompt each endpoint holds, as the engines reported it. An endpoint without a
        claim, or that we do not know, has `state.has_claim` False; a prompt without exact tokens
        matches nothing anywhere. Mutates nothing."""
        wanted = list(endpoints)
        rows, claiming = standings(self._views, self._index, wanted)
        return match_rows(wanted, rows, self._depths(request, claiming), {})

    def look_up(self, request: SchedulingRequest, endpoints: Iterable[EndpointId], now_s: float) -> LookUp:
        """As `match`, with what is expected from requests just placed. That makes no endpoint known: one
        without a claim has none. Matches come in the order of `endpoints`."""
        speculative = self._speculative
        if speculative is None:
            return LookUp(self.match(request, endpoints))
        wanted = list(endpoints)
        rows, claiming = standings(self._views, self._index, wanted)
        keys: dict[Family, PromptKeys] = {}
        depths = self._depths(request, claiming, keys)
        expected: dict[EndpointId, int] = {}
        for prompt in keys.values():
            expected.update(speculative.expected(prompt, depths, now_s))
        return LookUp(match_rows(wanted, rows, depths, expected), keys)

    def _state(self, endpoint: EndpointId, view: View) -> ClaimState:
        state = view.stream.state
        return ClaimState.UNSUPPORTED if state.has_claim and self._index.unsupported(endpoint) else state

    def _depths(
        self,
        request: SchedulingRequest,
        endpoints: list[EndpointId],
        keys: dict[Family, PromptKeys] | None = None,
    ) -> dict[EndpointId, Depths]:
        if request.token_ids is None or not endpoints:
            return {}
        forms = salt_forms(self._salt_key, request.cache_salt)
        queries = [PrefixQuery(request.token_ids, request.lora_name, salt) for salt in forms]
        try:
            # an engine publishes in one form, and finds nothing in the other; the first names the prompt
            found = self._index.depths(queries[0], endpoints, keys)
            others = [self._index.depths(query, endpoints) for query in queries[1:]]
        except InvalidTokens:  # ids that no engine could have: missing cache data is "no match"
            return {}
        for other in others:
            found = {endpoint: _deeper(depths, other[endpoint]) for endpoint, depths in found.items()}
        return found

    # --- where requests went --------------------------------------------------------------------

    def place(self, decision_id: str, look_up: LookUp, endpoints: Iterable[EndpointId], now_s: float) -> None:
        """The looked-up prompt goes to `endpoints`: expect it there, unless all of it is there already.
        Only where a claim can confirm or deny it, and in blocks of the size that the engine has shown."""
        if self._speculative is None or not look_up.keys:
            return
        placed = []
        for endpoint in dict.fromkeys(endpoints):
            view, match = self._views.get(endpoint), look_up.matches.get(endpoint, NO_MATCH)
            if view is not None and match.state.has_claim:
                keys = look_up.keys.get((view.model, match.block_size_tokens))
                if keys is not None and match.blocks < len(keys):
                    placed.append((endpoint, keys))
        self._speculative.place(decision_id, placed, now_s)

    def on_first_token(self, decision_id: str) -> None:
        """The placed prompt was computed."""
        if self._speculative is not None:
            self._speculative.settle(decision_id)

    def on_release(self, decision_id: str) -> None:
        """The placed request has ended; without a first token, nothing is expected of it any more."""
        if self._speculative is not None:
            self._speculative.withdraw(decision_id)

    # --- what telemetry reads -------------------------------------------------------------------

    def state(self, endpoint: EndpointId) -> ClaimState:
        """UNKNOWN for endpoints that were not added."""
        view = self._views.get(endpoint)
        return ClaimState.UNKNOWN if view is None else self._state(endpoint, view)

    def stats(self, endpoint: EndpointId) -> ViewStats:
        """Raises KeyError for an endpoint that was not added."""
        view = self._views[endpoint]
        state = self._state(endpoint, view)
        return ViewStats(
            state=state,
            known_empty_start=view.stream.known_empty_start and state.has_claim,
            index=self._index.stats(endpoint),
            counters=view.counters,
            held_batches=view.stream.held_batches,
            last_event_s=view.last_event_s,
            speculative_entries=self._speculative.entries(endpoint) if self._speculative else 0,
        )

    @property
    def index_bytes(self) -> int:
        """What the index takes, as counted against its bound."""
        return self._index.total_bytes

    # --- who differs from the pool --------------------------------------------------------------

    def differing_block_sizes(self) -> frozenset[EndpointId]:
        """Endpoints whose block size, once learned, is not the usual one of their model."""
        by_model: dict[str, dict[EndpointId, int]] = {}
        for endpoint, view in self._views.items():
            size = self._index.block_size_tokens(endpoint)
            if size:
                by_model.setdefault(view.model, {})[endpoint] = size
        return frozenset().union(*map(differing, by_model.values()))

    def hash_disagreements(self) -> tuple[HashDisagreement, ...]:
        """Endpoints whose engines name equal content differently: another hash seed or algorithm."""
        return hash_disagreements({e: self._index.names_of_sample(e) for e in self._views})


def _deeper(one: Depths, other: Depths) -> Depths:
    return Depths(
        max(one.blocks, other.blocks),
        max(one.device_blocks, other.device_blocks),
        max(one.cpu_blocks, other.cpu_blocks),
    )
