"""S-C13, S-C16: who differs from the pool is named, by block size and by block names."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine_plugin.identity import EndpointId
from epp.core.cache_view import CacheView
from epp.core.engine_agreement import HashDisagreement, differing, hash_disagreements
from epp.core.events import BlockStored, Event, EventBatch
from epp.core.index_choice import IndexMaker
from epp.core.name_sample import SAMPLE_SIZE, NameSample
from epp.core.types import BlockKey, CacheTier, ClaimState, EngineBlockHash, SchedulingRequest

A, B, C, D = (EndpointId(name) for name in "abcd")


def chain(seed: int, *, salt: str | None = None, size: int = 1, blocks: int = 400) -> BlockStored:
    """Blocks 0.. of one prompt, named as an engine with that seed names them."""
    extra = ((salt,), *[None] * (blocks - 1)) if salt else None
    hashes = tuple(EngineBlockHash(seed * 1_000_000 + n + 1) for n in range(blocks))
    return BlockStored(
        CacheTier.DEVICE, hashes, None, list(range(blocks * size)), size, None, extra, extra is not None
    )


def view_of(make_index: IndexMaker, told: dict[EndpointId, Event], model: str = "") -> CacheView:
    view = CacheView(make_index(b"a" * 16))
    for endpoint, event in told.items():
        view.add_endpoint(endpoint, has_replay=False, model=model)
        view.on_batch(endpoint, 0, EventBatch((event,)), 1.0)
    return view


def test_the_endpoint_with_another_seed_is_named(make_index: IndexMaker) -> None:
    view = view_of(make_index, {A: chain(1), B: chain(2), C: chain(1), D: chain(1)})
    (found,) = view.hash_disagreements()
    assert found.endpoint == B
    assert found.other in (A, C, D)


def test_of_two_that_disagree_both_are_named(make_index: IndexMaker) -> None:
    view = view_of(make_index, {A: chain(1), B: chain(2)})
    assert view.hash_disagreements() == (HashDisagreement(A, B), HashDisagreement(B, A))


def test_equal_tokens_of_other_content_prove_nothing(make_index: IndexMaker) -> None:
    """Another salt, adapter, block size or model makes other names with the same seed."""
    view = view_of(make_index, {A: chain(1), B: chain(2, salt="salt"), C: chain(3, size=2)})
    view.add_endpoint(D, has_replay=False, model="other")
    view.on_batch(D, 0, EventBatch((replace(chain(4)),)), 1.0)
    view.on_batch(D, 1, EventBatch((replace(chain(5), lora_name="tuned"),)), 1.0)
    assert view.hash_disagreements() == ()


def test_a_restart_with_the_right_seed_ends_the_report(make_index: IndexMaker) -> None:
    view = view_of(make_index, {A: chain(1), B: chain(2), C: chain(1)})
    view.remove_endpoint(B)
    assert view.hash_disagreements() == ()
    view.add_endpoint(B, has_replay=False)
    view.on_batch(B, 0, EventBatch((chain(1),)), 1.0)
    assert view.hash_disagreements() == ()


def test_the_evidence_outlives_the_blocks(make_index: IndexMaker) -> None:
    index = make_index(b"a" * 16)
    index.add_endpoint(A)
    index.apply(A, [chain(1)])
    sample = index.names_of_sample(A)
    assert SAMPLE_SIZE <= len(sample) < 2 * SAMPLE_SIZE
    assert set(sample.values()) <= set(chain(1).hashes)
    index.add_endpoint(B)
    index.apply(B, [chain(2)])
    assert sample.keys() == index.names_of_sample(B).keys()  # the same content, so the same keys
    index.clear(A)
    assert index.names_of_sample(A) == {}


def test_a_sample_keeps_the_smallest_keys() -> None:
    sample = NameSample()
    for key in range(5_000, 0, -1):
        if key < sample.below:
            sample.note(BlockKey(key), EngineBlockHash(key + 7))
    pairs = sample.pairs()
    assert set(range(1, SAMPLE_SIZE + 1)) <= pairs.keys()
    assert len(pairs) < 2 * SAMPLE_SIZE
    assert all(name == key + 7 for key, name in pairs.items())


def test_sides_are_found_through_third_parties() -> None:
    """A and C share no block, but both agree with B."""
    key, name = [BlockKey(n) for n in range(4)], [EngineBlockHash(n) for n in range(9)]
    samples = {
        A: {key[0]: name[0]},
        B: {key[0]: name[0], key[1]: name[1]},
        C: {key[1]: name[1], key[2]: name[2]},
        D: {key[2]: name[8]},
    }
    assert hash_disagreements(samples) == (HashDisagreement(D, C),)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, set()),
        ({A: 16, B: 16}, set()),
        ({A: 16, B: 16, C: 768}, {C}),
        ({A: 16, B: 768}, {A, B}),
        ({A: 16, B: 16, C: 768, D: 32}, {C, D}),
    ],
)
def test_the_usual_value_is_what_most_have(sizes: dict[EndpointId, int], expected: set[EndpointId]) -> None:
    assert differing(sizes) == expected


def test_an_endpoint_of_another_block_size_is_reported(make_index: IndexMaker) -> None:
    view = view_of(make_index, {A: chain(1), B: chain(1, size=4), C: chain(1)})
    assert view.differing_block_sizes() == {B}
    view.add_endpoint(D, has_replay=False, model="other")
    view.on_batch(D, 0, EventBatch((chain(1, size=8),)), 1.0)
    assert view.differing_block_sizes() == {B}


def test_a_group_without_a_rule_leaves_no_claim(make_index: IndexMaker) -> None:
    mamba = replace(chain(1), group_kind="mamba", group_idx=1)
    view = view_of(make_index, {A: chain(1)})
    request = SchedulingRequest("r", token_ids=list(range(400)))
    assert view.match(request, [A])[A].cached_tokens == 400
    view.on_batch(A, 1, EventBatch((mamba,)), 1.0)
    match = view.match(request, [A])[A]
    assert (match.state, match.cached_tokens, match.servable_tokens) == (ClaimState.UNSUPPORTED, 0, 0)
    assert (match.state.has_claim, match.known_empty_start) == (False, False)
    stats = view.stats(A)
    assert (stats.state, view.state(A)) == (ClaimState.UNSUPPORTED, ClaimState.UNSUPPORTED)
    assert (stats.index.unsupported, stats.counters.unsupported_blocks) == ("group_kind", 400)
    assert not stats.known_empty_start


def test_an_engine_that_only_speaks_of_unsupported_groups_is_deaf(make_index: IndexMaker) -> None:
    view = view_of(make_index, {A: replace(chain(1), group_kind="mamba", group_idx=1)})
    assert view.stats(A).deaf
