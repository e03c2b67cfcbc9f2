"""Checks of what must be equal in the whole pool: block size, hash, model and layout. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from epp.ops.doctor.facts import Facts, Listed
from epp.ops.doctor.findings import Check, Finding

_BLOCK_SIZE = ("block_size",)
_SEED = ("hash_algo", "seed_fp")
_REST = ("protocol", "model_fp", "layout_fp")
_REMEDIES = {
    "block_size": "start every engine with the same --block-size (and offloaded block size), then restart it",
    "hash_algo": "start every engine with the same --prefix-caching-hash-algo",
    "seed_fp": "start every engine with the same PYTHONHASHSEED; unset it is a random one a process",
    "protocol": "run the same version of the engine plugin everywhere",
    "model_fp": "serve the same model and revision in the whole pool, or make it two pools",
    "layout_fp": "use the same tensor parallel size, KV dtype and cache layout in the whole pool",
}


def block_sizes(facts: Facts, blamed: frozenset[str]) -> Check:
    """Also what the picker concludes from events alone (stock engines report no info)."""
    found = list(_odd_ones(facts, _BLOCK_SIZE, blamed))
    named = blamed.union(*(finding.endpoints for finding in found))
    for row in facts.endpoints:
        if row.differs_from_pool and row.name not in named:
            found.append(
                Finding(
                    row.name,
                    f"its events have blocks of {row.block_size_tokens} tokens, unlike the rest of the pool",
                    _REMEDIES["block_size"],
                    endpoints=frozenset({row.name}),
                )
            )
    sizes = sorted({row.block_size_tokens for row in facts.endpoints if row.block_size_tokens})
    return Check("block sizes", f"{_plural(sizes)} tokens" if sizes else "not told yet", tuple(found))


def seeds(facts: Facts, blamed: frozenset[str]) -> Check:
    found = list(_odd_ones(facts, _SEED, blamed))
    named = blamed.union(*(finding.endpoints for finding in found))
    for row in facts.endpoints:
        if row.hashes_unlike is not None and row.name not in named and row.hashes_unlike not in named:
            found.append(
                Finding(
                    row.name,
                    f"it names blocks of the same tokens unlike {row.hashes_unlike}",
                    f"{_REMEDIES['seed_fp']}; {_REMEDIES['hash_algo']}",
                    endpoints=frozenset({row.name}),
                )
            )
    told = sum(row.info is not None for row in facts.endpoints)
    return Check("hash seeds", f"{told} of {len(facts.endpoints)} engines report theirs", tuple(found))


def models(facts: Facts, blamed: frozenset[str]) -> Check:
    found = tuple(_odd_ones(facts, _REST, blamed))
    return Check("model and layout", f"{len(facts.endpoints)} engines", found)


def _odd_ones(facts: Facts, fields: tuple[str, ...], blamed: frozenset[str]) -> Iterator[Finding]:
    """Endpoints in the minority for one of `fields`; for each its first such field. Where there is no
    majority, everybody who differs from the first."""
    done: set[str] = set(blamed)
    for field in fields:
        rows = [row for row in facts.endpoints if row.info is not None and row.name not in done]
        values = Counter(_value(row, field) for row in rows)
        if len(values) < 2:
            continue
        (usual, most), (_, second) = values.most_common(2)
        tie = most == second
        for row in rows:
            value = _value(row, field)
            if value != usual:
                done.add(row.name)
                others = "the others" if not tie else "half of the pool"
                yield Finding(
                    row.name,
                    f"{field} is {value}, of {others} {usual}",
                    _REMEDIES[field],
                    endpoints=frozenset({row.name}),
                )


def _value(row: Listed, field: str) -> str:
    assert row.info is not None
    return str(row.info.get(field))


def _plural(values: list[int]) -> str:
    return " and ".join(map(str, values))
