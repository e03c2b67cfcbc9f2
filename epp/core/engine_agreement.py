"""Which endpoints differ from their pool: in block size, or in how their engines name equal content.

Engines whose hash seeds or algorithms differ can never serve each other a block (case S-C16), and
nothing fails loudly: every pull comes back empty. Our keys say which content is equal (model, adapter,
salt and extra keys are part of them), so one key under two engine names proves the difference, with
stock engines, too. Block names are compared on samples (`name_sample`). The endpoints that are fewer
are named as those that differ; where neither side is larger, all are.
Pure functions; they must not know the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from engine_plugin.identity import EndpointId
from epp.core.types import BlockKey, EngineBlockHash


@dataclass(frozen=True, slots=True, order=True)
class HashDisagreement:
    """`endpoint`, of the smaller side, names a block otherwise than `other` does."""

    endpoint: EndpointId
    other: EndpointId


def differing(values: Mapping[EndpointId, Hashable]) -> frozenset[EndpointId]:
    """Endpoints whose value is not the one most have; all of them where two values are most common."""
    ranked = Counter(values.values()).most_common(2)
    if len(ranked) < 2:
        return frozenset()
    if ranked[0][1] == ranked[1][1]:
        return frozenset(values)
    return frozenset(endpoint for endpoint, value in values.items() if value != ranked[0][0])


def hash_disagreements(
    samples: Mapping[EndpointId, Mapping[BlockKey, EngineBlockHash]],
) -> tuple[HashDisagreement, ...]:
    """One entry an endpoint of each smaller side. Linear in the samples."""
    side = {endpoint: endpoint for endpoint in samples}  # union-find of those who agree on some block

    def find(endpoint: EndpointId) -> EndpointId:
        while side[endpoint] != endpoint:
            side[endpoint] = side[side[endpoint]]
            endpoint = side[endpoint]
        return endpoint

    first: dict[tuple[BlockKey, EngineBlockHash], EndpointId] = {}
    names: dict[BlockKey, dict[EngineBlockHash, EndpointId]] = {}
    for endpoint, sample in samples.items():
        for key, name in sample.items():
            side[find(endpoint)] = find(first.setdefault((key, name), endpoint))
            names.setdefault(key, {}).setdefault(name, endpoint)
    sizes = Counter(find(endpoint) for endpoint in samples)
    against: dict[EndpointId, EndpointId] = {}  # side -> an endpoint of one at least as large
    for by_name in names.values():
        if len(by_name) > 1:
            _note_smaller(list(by_name.values()), find, sizes, against)
    return tuple(sorted(HashDisagreement(e, against[find(e)]) for e in samples if find(e) in against))


def _note_smaller(
    endpoints: list[EndpointId],
    find: Callable[[EndpointId], EndpointId],
    sizes: Mapping[EndpointId, int],
    against: dict[EndpointId, EndpointId],
) -> None:
    """The endpoints name one block differently: every side but the largest is against that one."""
    largest = max(endpoints, key=lambda endpoint: sizes[find(endpoint)])
    for endpoint in endpoints:
        if endpoint is largest:
            continue
        against.setdefault(find(endpoint), largest)
        if sizes[find(endpoint)] == sizes[find(largest)]:
            against.setdefault(find(largest), endpoint)
