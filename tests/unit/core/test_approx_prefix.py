"""What placements suggest: learned from where prompts were sent, bounded, never a source."""

from __future__ import annotations

from array import array
from dataclasses import replace

from engine_plugin.identity import EndpointId
from epp.core.approx_prefix import ApproxPrefixes, ApproxSettings
from epp.core.disagg import SingleProfileHandler
from epp.core.endpoint_picker import PickerSettings
from epp.core.load_ledger import LoadEstimate
from epp.core.scheduler import Profile
from epp.core.source_selector import SourceProducer
from epp.core.types import Outcome, SchedulingRequest, SourceReason
from epp.plugins.pickers import MaxScorePicker
from epp.plugins.plugin_type import PLACED
from epp.plugins.scorers import PrefixCacheScorer
from tests.unit.core.test_endpoint_picker import Pool

A, B = EndpointId("a"), EndpointId("b")
SETTINGS = ApproxSettings(block_size_tokens=64)


def request(tokens: int, start: int = 0, **changed: object) -> SchedulingRequest:
    base = SchedulingRequest("r", "m", array("I", range(start, start + tokens)))
    return replace(base, **changed)  # type: ignore[arg-type]


def blocks(prefixes: ApproxPrefixes, asked: SchedulingRequest) -> dict[EndpointId, int]:
    return {e: match.blocks for e, match in prefixes.look_up(asked, [A, B]).matches.items()}


def sent(prefixes: ApproxPrefixes, asked: SchedulingRequest, *endpoints: EndpointId) -> None:
    prefixes.place(prefixes.look_up(asked, [A, B]), endpoints)
    prefixes.check_integrity()


def test_a_prompt_counts_where_it_was_sent() -> None:
    prefixes = ApproxPrefixes(SETTINGS)
    assert blocks(prefixes, request(640)) == {A: 0, B: 0}
    sent(prefixes, request(640), A)
    assert blocks(prefixes, request(640)) == {A: 10, B: 0}
    assert blocks(prefixes, request(1_000)) == {A: 10, B: 0}  # a longer one shares its head
    assert blocks(prefixes, request(330)) == {A: 5, B: 0}
    assert blocks(prefixes, request(640, start=1)) == {A: 0, B: 0}


def test_model_adapter_and_salt_keep_prompts_apart() -> None:
    prefixes = ApproxPrefixes(SETTINGS)
    sent(prefixes, request(640), A)
    for changed in ({"model": "other"}, {"lora_name": "x"}, {"cache_salt": "s"}):
        assert blocks(prefixes, request(640, **changed)) == {A: 0, B: 0}


def test_pieces_of_text_and_tokens_never_meet() -> None:
    prefixes = ApproxPrefixes(SETTINGS)
    by_pieces = request(0, token_ids=None, pieces=array("I", range(640)))
    sent(prefixes, by_pieces, B)
    assert blocks(prefixes, by_pieces) == {A: 0, B: 10}
    assert blocks(prefixes, request(640)) == {A: 0, B: 0}


def test_only_so_much_of_a_prompt_is_looked_at() -> None:
    prefixes = ApproxPrefixes(replace(SETTINGS, max_blocks=4))
    sent(prefixes, request(640), A)
    assert blocks(prefixes, request(640)) == {A: 4, B: 0}


def test_over_capacity_the_tail_goes_and_the_head_stays() -> None:
    """router PR 2661: an LRU of blocks lost the head first, and with it everything."""
    prefixes = ApproxPrefixes(replace(SETTINGS, capacity_blocks=12))
    sent(prefixes, request(640), A)
    sent(prefixes, request(320, start=10_000), A)
    assert prefixes.held_blocks(A) == 12
    assert blocks(prefixes, request(640)) == {A: 7, B: 0}
    assert blocks(prefixes, request(320, start=10_000)) == {A: 5, B: 0}


def test_an_endpoint_that_left_holds_nothing() -> None:
    prefixes = ApproxPrefixes(SETTINGS)
    sent(prefixes, request(640), A, B)
    prefixes.forget(A)
    assert blocks(prefixes, request(640)) == {A: 0, B: 10}


def test_ids_that_no_engine_has_match_nothing() -> None:
    prefixes = ApproxPrefixes(SETTINGS)
    assert blocks(prefixes, request(0, token_ids=[-1] * 640)) == {A: 0, B: 0}
    assert blocks(prefixes, request(0, token_ids=None)) == {A: 0, B: 0}


def picker_pool() -> Pool:
    scorers = ((PrefixCacheScorer("prefix", prefix=PLACED), 1.0),)
    profile = Profile("default", (), scorers, MaxScorePicker("max"))
    return Pool(
        PickerSettings(
            SingleProfileHandler(profile), SourceProducer(1), approx=SETTINGS, estimate=LoadEstimate(PLACED)
        )
    )


def test_a_session_stays_without_any_event_and_is_never_pulled() -> None:
    pool = picker_pool()
    first = pool.picker.schedule(request(6_400), 0.0, "1")
    pool.picker.release("1", Outcome(status=200, completed=True))
    assert pool.picker.ledger.load(first.destination.id).tokens == 0
    for n in range(20):
        turn = pool.picker.schedule(replace(request(6_400 + 64 * n), request_id=f"r{n}"), 1.0, f"t{n}")
        assert turn.destination.id == first.destination.id
        assert turn.kv_source is None
        assert turn.choice.reason is SourceReason.NO_HOLDER
    # what is expected there is not counted as work: 20 suffixes, each of which the next one shares
    assert pool.picker.ledger.load(first.destination.id).tokens == 19 * 64


def test_a_pod_that_leaves_takes_its_placements_along() -> None:
    pool = picker_pool()
    first = pool.picker.schedule(request(6_400), 0.0, "1")
    pool.picker.remove_endpoint(first.destination.id)
    pool.picker.upsert_endpoint(first.destination)
    again = pool.picker.schedule(request(6_400), 1.0, "2")
    assert {s.score for s in again.scored} == {0.0}


def test_an_engine_that_says_how_much_it_holds_is_believed_that_much() -> None:
    """`autoTune`: A's cache has 320 tokens, B does not say and gets what is configured."""
    tuned = ApproxPrefixes(replace(SETTINGS, capacity_blocks=20, auto_tune=True))
    sent(tuned, request(640), A, B)
    tuned.note_cache(A, 320)
    tuned.note_cache(B, None)
    tuned.check_integrity()
    assert blocks(tuned, request(640)) == {A: 5, B: 10}
    sent(tuned, request(640), A)
    assert blocks(tuned, request(640)) == {A: 5, B: 10}
    tuned.forget(A)  # another engine may come under the name
    sent(tuned, request(640), A)
    assert blocks(tuned, request(640)) == {A: 10, B: 10}


def test_without_auto_tune_the_configured_capacity_holds() -> None:
    plain = ApproxPrefixes(replace(SETTINGS, capacity_blocks=20))
    sent(plain, request(640), A)
    plain.note_cache(A, 320)
    assert blocks(plain, request(640)) == {A: 10, B: 0}
