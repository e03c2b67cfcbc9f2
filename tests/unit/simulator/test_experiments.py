"""Experimental policies in virtual time: chosen by configuration alone, the samples of config/epp."""

from __future__ import annotations

from pathlib import Path

from engine_plugin.identity import EndpointId
from epp.config import parse_config
from epp.core.thresholds import PullSettings
from epp.core.types import ClaimState
from simulator.fleet import Fleet, FleetShape
from simulator.requests import Record
from simulator.what_if import COST, settings_of
from tests.unit.simulator.test_fleet import ask_on, busy_everywhere_but, free
from tests.unit.simulator.world import PROFILE, SMALL, ask, text

CONFIGS = Path(__file__).parents[3] / "config" / "epp"
TOKENS = 20_000
WHOLE = TOKENS // SMALL.block_tokens * SMALL.block_tokens  # of a prompt, in whole blocks


def fleet(name: str, engines: int = 2, thresholds: PullSettings | None = None, *, off: bool = False) -> Fleet:
    """`off`: the same sample with its experimental plugin taken out."""
    config = (CONFIGS / f"{name}.yaml").read_text()
    if off:
        config = config.replace("      - pluginRef: kvpull-second-copy-filter\n", "")
    shape = FleetShape(engines=engines, shape=SMALL, gateway_s=0.0)
    return Fleet(shape, PROFILE, parse_config(config, name), thresholds)


def test_predicted_ttft_weighs_the_holders_queue_against_a_pull() -> None:
    two = fleet("predicted-ttft", thresholds=settings_of(COST, PROFILE))
    first = ask(two, text(1, TOKENS + 8))
    assert ask(two, text(1, TOKENS + 8)).computing == first.computing, "a hit costs nothing"
    holder = EndpointId(first.computing)
    other = next(e.pod for e in two.engines if e != holder)
    busy_everywhere_but(two, other)  # 1,000 tokens of queue, 30 ms: less than pulling 20,000 tokens
    assert ask(two, text(1, TOKENS + 8)).computing == first.computing
    free(two)
    two.picker.ledger.book(
        "deep", serving=holder, computing=holder, source=None, uncached_prompt_tokens=30_000
    )
    record = ask(two, text(1, TOKENS + 8))
    two.picker.ledger.release("deep")
    assert (record.computing, record.source, record.pulled_tokens) == (other, first.computing, WHOLE)
    two.check()


def burst(several: Fleet, count: int) -> list[Record]:
    """Requests for one prefix, a little apart, each answered for a while."""
    found: list[Record] = []
    for n in range(count):

        def send() -> None:
            found.append(several.submit(text(1, TOKENS + 400), TOKENS, 400))

        several.timeline.after(0.2 * n, send)
    several.run()
    several.check()
    return found


def test_a_hot_prefix_gets_a_second_holder_by_one_pull() -> None:
    hot = fleet("second-copy", engines=4)
    ask(hot, text(1, TOKENS + 8))
    records = burst(hot, 12)
    assert {r.computing for r in records} - {records[0].computing}, "more than one endpoint serves it"
    assert len({r.computing for r in records}) == 2, "maxCopies"
    pulled = [r for r in records if r.pulled_tokens]
    assert [(r.pulled_tokens, r.source) for r in pulled] == [(WHOLE, records[0].computing)]
    assert hot.network.moved_bytes == pulled[0].pulled_bytes


def test_without_the_filter_everybody_waits_for_the_one_holder() -> None:
    """The negative control of the same sample."""
    cold = fleet("second-copy", engines=4, off=True)
    ask(cold, text(1, TOKENS + 8))
    records = burst(cold, 12)
    assert len({r.computing for r in records}) == 1
    assert cold.network.moved_bytes == 0.0


def session(several: Fleet) -> tuple[Record, Record]:
    """Two turns; after the first the holder has other work."""
    first = ask_on(several, "engine-0000", 1, TOKENS)  # the prefix is there
    book, release = several.picker.ledger.book, several.picker.ledger.release
    one, other = EndpointId("engine-0000"), EndpointId("engine-0001")
    book("elsewhere", serving=other, computing=other, source=None, uncached_prompt_tokens=0)

    def while_answered() -> None:
        book("here", serving=one, computing=one, source=None, uncached_prompt_tokens=0)
        release("elsewhere")

    found: list[Record] = []

    def send(tokens: int) -> None:
        found.append(several.submit(text(1, tokens + 50), tokens, 50, session="s"))

    several.timeline.after(0.0, send, TOKENS)
    several.timeline.after(0.05, while_answered)
    several.timeline.after(20.0, send, TOKENS + 200)
    several.run()
    release("here")
    several.check()
    assert first.computing == found[0].computing == "engine-0000"
    return found[0], found[1]


def test_the_next_turn_finds_its_prefix_where_it_runs() -> None:
    several = fleet("next-turn")
    _, second = session(several)
    assert (several.orders.count, several.orders.moved_tokens) == (1, WHOLE)
    assert (second.computing, second.restored_tokens, second.pulled_tokens) == ("engine-0001", WHOLE, 0)
    assert several.picker.cache.state(EndpointId("engine-0001")) is ClaimState.LIVE


def test_without_the_prefetcher_the_next_turn_pulls_itself() -> None:
    """The negative control: the same two turns."""
    config = (CONFIGS / "next-turn.yaml").read_text()
    start, _, rest = config.partition("  - type: kvpull-next-turn-prefetcher\n")
    config = start + rest[rest.index("  - type: max-score-picker") :]
    shape = FleetShape(engines=2, shape=SMALL, gateway_s=0.0)
    several = Fleet(shape, PROFILE, parse_config(config, "without"))
    _, second = session(several)
    assert several.orders.count == 0
    answered = (TOKENS + 50) // SMALL.block_tokens * SMALL.block_tokens  # its answer was held, too
    assert (second.computing, second.restored_tokens, second.pulled_tokens) == ("engine-0001", 0, answered)
