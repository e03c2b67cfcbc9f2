"""One request's pull, step by step as vLLM's scheduler drives it."""

from __future__ import annotations

from engine_plugin.transport import Offer
from engine_plugin.vllm.request_pull import Answer, RequestPull, Stage
from engine_plugin.vllm.transfer_params import Source

KEYS = [bytes([number]) * 4 for number in range(6)]
SOURCE = Source("id", ("127.0.0.1", 7777), handed_over=False)


def offer(blocks: int) -> Offer:
    return Offer("o", SOURCE.address, "peer", "id", blocks, (1,) * blocks, (2,) * blocks, 10.0)


def asked(blocks: int = 4) -> RequestPull:
    pull = RequestPull(SOURCE, 1.0)
    for key in KEYS[:blocks]:
        assert pull.look_up(key) is Answer.LATER
    assert pull.wants_to_ask
    assert pull.ask() == tuple(KEYS[:blocks])
    return pull


def test_the_first_scan_collects_and_the_answer_is_awaited() -> None:
    pull = asked()
    assert not pull.wants_to_ask
    assert pull.look_up(KEYS[0]) is Answer.LATER
    assert pull.look_up(KEYS[5]) is Answer.LATER
    assert tuple(pull.keys) == tuple(KEYS[:4])


def test_hits_are_the_offered_prefix_of_the_question() -> None:
    pull = asked()
    pull.offered(offer(2))
    assert [pull.look_up(key) for key in KEYS] == [Answer.HIT] * 2 + [Answer.MISS] * 4
    taken = pull.take(KEYS[:2])
    assert taken is not None
    assert pull.stage is Stage.MOVING
    assert [pull.look_up(key) for key in KEYS[:2]] == [Answer.MISS] * 2  # vLLM's own tier knows them now
    pull.end("ok", 2, 99)
    assert pull.look_up(KEYS[0]) is Answer.MISS
    assert (pull.outcome.reason, pull.outcome.received_blocks, pull.outcome.received_bytes) == ("ok", 2, 99)


def test_fewer_slots_than_offered_take_the_leading_blocks() -> None:
    pull = asked()
    pull.offered(offer(4))
    assert pull.take(KEYS[:3]) is not None


def test_slots_for_other_blocks_than_the_leading_ones_take_nothing() -> None:
    pull = asked()
    pull.offered(offer(4))
    assert pull.take(KEYS[1:3]) is None
    assert pull.take(KEYS[:5]) is None
    assert pull.take([KEYS[1], KEYS[0]]) is None
    assert pull.stage is Stage.OFFERED


def test_an_offer_without_slots_is_given_back_once_vllm_has_heard_of_it() -> None:
    pull = asked()
    pull.offered(offer(4))
    assert pull.untaken_offer() is None  # vLLM has not looked yet
    pull.look_up(KEYS[0])
    assert pull.untaken_offer() is not None
    assert pull.stage is Stage.DONE
    assert pull.outcome.reason == "no_slots"


def test_a_request_that_goes_gives_its_offer_back() -> None:
    pull = asked()
    pull.offered(offer(4))
    assert pull.abandon() is not None
    assert pull.outcome.reason == "aborted"
    assert pull.abandon() is None


def test_a_request_that_had_everything_asked_nobody() -> None:
    pull = RequestPull(SOURCE, 1.0)
    assert not pull.wants_to_ask
    assert pull.abandon() is None
    assert pull.outcome.reason == "local"
