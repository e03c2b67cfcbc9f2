"""What plugins read of a request, and what they tell the client."""

from __future__ import annotations

from dataclasses import replace

from epp.core.approx_prefix import ApproxSettings
from epp.core.disagg import SingleProfileHandler
from epp.core.scheduler import Profile
from epp.extproc.events import Routing
from epp.plugins.pickers import RandomPicker
from epp.plugins.plugin_type import PLACED
from epp.plugins.scorers import PrefixCacheScorer
from epp.plugins.session_affinity import EncodedEndpoint, SessionAffinity
from epp.request.pieces import MAX_PIECES, prompt_pieces
from epp.request.prompts import ChatPrompt, TextPrompt, TokenPrompt
from tests.unit.core.test_endpoint_picker import SETTINGS
from tests.unit.director.rig import BASE, Rig

FIELDS = {"model": BASE, "prompt": "Hello"}


def sticky(rig: Rig) -> None:
    plugin = SessionAffinity("s", EncodedEndpoint("x-session-token"))
    profile = Profile("default", (plugin,), (), RandomPicker("r"))
    rig.pool.picker.apply(
        replace(
            SETTINGS,
            handler=SingleProfileHandler(profile),
            followers=(plugin,),
            header_names=plugin.header_names,
        )
    )


async def test_a_session_stays_by_the_header_that_the_client_sends_back() -> None:
    rig = Rig()
    sticky(rig)
    first = await rig.route(FIELDS)
    token = first.response_headers["x-session-token"]
    for _ in range(10):
        again: Routing = await rig.route(FIELDS, headers=(("x-session-token", token), ("x-other", "1")))
        assert again.destination == first.destination
    assert rig.requests[-1].headers == {"x-session-token": token}  # and nothing else of the headers
    others = {(await rig.route(FIELDS)).destination for _ in range(30)}
    assert len(others) == 3  # negative control: without the header it goes anywhere


async def test_without_plugins_that_read_headers_none_reaches_the_core() -> None:
    rig = Rig()
    await rig.route(FIELDS, headers=(("x-session-token", "abc"),))
    assert rig.requests[-1].headers == {}
    assert rig.requests[-1].pieces is None


async def test_prompts_without_tokens_are_matched_by_pieces_where_placements_count() -> None:
    rig = Rig()
    rig.director._tokeniser = None
    profile = Profile("d", (), ((PrefixCacheScorer("p", prefix=PLACED), 1.0),), RandomPicker("r"))
    picker = rig.pool.picker
    picker.apply(replace(SETTINGS, handler=SingleProfileHandler(profile)))
    assert not picker.reads_placements
    rig.pool = type(rig.pool)(replace(SETTINGS, approx=ApproxSettings()))
    assert rig.pool.picker.reads_placements
    rig.director._picker = rig.pool.picker
    schedule = rig.pool.picker.schedule
    rig._schedule, rig.pool.picker.schedule = schedule, rig._record  # type: ignore[method-assign]
    await rig.route({"model": BASE, "prompt": "word " * 1_000})
    pieces = rig.requests[-1].pieces
    assert pieces is not None
    assert len(pieces) == 1_250


def test_pieces_keep_the_head_of_a_conversation() -> None:
    turns = [{"role": "user", "content": f"turn {n} " + "x" * 400} for n in range(6)]
    short, long = (prompt_pieces(ChatPrompt(turns[:n])) for n in (3, 6))
    assert short is not None
    assert long is not None
    assert long[: len(short)] == short
    assert len(long) > len(short) > 300
    with_tools = prompt_pieces(ChatPrompt(turns[:3], tools=[{"type": "function"}]))
    assert with_tools is not None
    assert with_tools[:5] != short[:5]


def test_pieces_are_bounded_and_never_raise() -> None:
    assert prompt_pieces(TokenPrompt([1, 2])) is None
    whole = prompt_pieces(TextPrompt("y" * (MAX_PIECES * 8)))
    assert whole is not None
    assert len(whole) == MAX_PIECES
    broken = prompt_pieces(ChatPrompt([{"role": "user", "content": "\ud800"}]))
    assert broken is not None
    assert prompt_pieces(TextPrompt("\ud800abc")) is not None
