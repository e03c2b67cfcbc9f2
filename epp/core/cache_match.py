"""How far each endpoint can be spoken for: one pass, no call for each of a thousand endpoints. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_plugin.identity import EndpointId
from epp.core.index_interface import PrefixIndex
from epp.core.types import ClaimState
from epp.core.view_state import Standing, View

_STRANGER = Standing(None, 0, False, False)


def standings(
    views: Mapping[EndpointId, View], index: PrefixIndex, endpoints: Sequence[EndpointId]
) -> tuple[list[Standing], list[EndpointId]]:
    """Of each, in the order of `endpoints`; and those whose blocks may be counted. What is known of a view
    is kept there until it changes (`View.standing`)."""
    rows = []
    for endpoint in endpoints:
        view = views.get(endpoint)
        if view is None:
            rows.append(_STRANGER)
        else:
            rows.append(view.standing or _renew(endpoint, view, index))
    return rows, [endpoint for endpoint, row in zip(endpoints, rows, strict=True) if row[3]]


def _renew(endpoint: EndpointId, view: View, index: PrefixIndex) -> Standing:
    state, from_empty = view.stream.state, view.stream.known_empty_start
    if state.has_claim and index.unsupported(endpoint):
        state, from_empty = ClaimState.UNSUPPORTED, False
    view.standing = Standing(state, index.block_size_tokens(endpoint), from_empty, state.has_claim)
    return view.standing
