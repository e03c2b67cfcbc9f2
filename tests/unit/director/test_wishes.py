"""What requests say of themselves in headers: names, aliases, nonsense, and what comes of it."""

from __future__ import annotations

import gzip
import json

import pytest

from epp.core.errors import NoEndpoints, NotCached
from epp.core.types import Outcome
from epp.extproc import events as ev
from epp.extproc import wire
from epp.extproc.conformance import ConformanceHandler
from epp.extproc.events import Headers
from epp.extproc.wishes import Wishes, read_wishes
from tests.unit.director.rig import BASE, Rig

PROMPT = {"model": BASE, "prompt": "The cat sat on the mat and looked at it. " * 40}
REWRITE = wire.MODEL_NAME_REWRITE[0]
IF_AVAILABLE = (("prefer", "if-available"),)


@pytest.mark.parametrize("name", range(2))
def test_every_name_and_its_alias(name: int) -> None:
    headers = Headers.of(
        (wire.OBJECTIVE[name], "chat"),
        (wire.FAIRNESS_ID[name], " tenant-7 "),
        (wire.MODEL_NAME_REWRITE[name], "m2"),
        (wire.SLO_TTFT_MS[name], "250"),
        (wire.SLO_TPOT_MS[name], "1e2"),
        ("Prefer", "respond-async, If-Available; wait=5"),
    )
    assert read_wishes(headers) == Wishes("m2", "chat", "tenant-7", True, 250.0, 100.0)


def test_the_new_name_wins() -> None:
    new, old = wire.FAIRNESS_ID
    assert read_wishes(Headers.of((old, "old"), (new, "new"))).fairness_id == "new"


@pytest.mark.parametrize("value", ["", "  ", "x" * 513, "a\x00b", "a\nb"])
def test_odd_names_are_no_wish(value: str) -> None:
    headers = Headers.of((wire.FAIRNESS_ID[0], value), (REWRITE, value), (wire.OBJECTIVE[0], value))
    assert read_wishes(headers) == Wishes()


@pytest.mark.parametrize("value", ["", "nan", "inf", "-1", "0", "soon"])
def test_odd_times_are_no_wish(value: str) -> None:
    assert read_wishes(Headers.of((wire.SLO_TTFT_MS[0], value))).slo_ttft_ms is None


@pytest.mark.parametrize("value", ["if-availables", "x; if-available", ""])
def test_other_preferences_are_not_ours(value: str) -> None:
    assert not read_wishes(Headers.of(("prefer", value))).if_available


# ---- Prefer: if-available -------------------------------------------------------------------------


async def test_only_a_holder_of_the_whole_prompt_is_good_enough() -> None:
    rig = Rig()
    with pytest.raises(NotCached) as refused:
        await rig.route(PROMPT, headers=IF_AVAILABLE)
    assert (refused.value.status, refused.value.reason) == (412, "not-cached")
    assert rig.value('llm_d_epp_request_error_total{error_code="not-cached"}') == 1
    await rig.hold("b", PROMPT)
    routing = await rig.route(PROMPT, headers=IF_AVAILABLE)
    assert routing.destination == rig.pool.picker.endpoints[1].address
    longer = PROMPT | {"prompt": PROMPT["prompt"] + "And then some more of it, for many blocks. " * 20}
    with pytest.raises(NotCached):
        await rig.route(longer, headers=IF_AVAILABLE)
    assert (await rig.route(longer)).destination  # without the preference it is served


async def test_a_prompt_that_is_not_known_is_in_no_cache() -> None:
    rig = Rig()
    with pytest.raises(NotCached):
        await rig.route({}, body=b"", headers=IF_AVAILABLE)


# ---- model rewrite --------------------------------------------------------------------------------


async def test_the_engine_is_asked_for_the_other_model_and_the_client_reads_its_own() -> None:
    rig = Rig()
    body = json.dumps(PROMPT | {"model": "alias", "n": 1.10}).encode()
    routing = await rig.route({}, body=body, headers=((REWRITE, BASE),))
    assert routing.body == body.replace(b'"alias"', f'"{BASE}"'.encode())
    assert routing.rename_model == (BASE, "alias")
    assert "accept-encoding" in routing.remove_headers
    assert rig.requests[0].model == BASE
    assert rig.requests[0].lora_name is None  # blocks of the base model, not of an adapter "alias"
    assert await rig.cached_tokens(PROMPT) == {}


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (b'{"prompt":"x"}', ()),
        (b'{"model":7,"prompt":"x"}', ()),
        (b"", ()),
        (json.dumps({"model": "new", "prompt": "x"}).encode(), ()),
        (gzip.compress(b'{"model":"m","prompt":"x"}'), (("content-encoding", "gzip"),)),
    ],
)
async def test_what_cannot_or_need_not_be_rewritten_goes_on_as_it_came(
    body: bytes, more: tuple[tuple[str, str], ...]
) -> None:
    routing = await Rig().route({}, body=body, headers=((REWRITE, "new"), *more))
    assert (routing.body, routing.rename_model) == (None, None)
    assert "accept-encoding" not in routing.remove_headers


# ---- conformance doubles ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "subset", "chosen"),
    [
        ("10.0.0.2", None, ["10.0.0.2:8000"]),
        ("10.0.0.2:8000, 10.0.0.0", {"10.0.0.0"}, ["10.0.0.0:8000"]),
        ("10.0.0.1", {"10.0.0.1:8000"}, ["10.0.0.1:8000"]),
        ("10.0.0.9", None, []),
        ("10.0.0.1", {"10.0.0.2"}, []),
    ],
)
async def test_named_endpoints_are_a_subset_of_the_subset(
    wanted: str, subset: set[str] | None, chosen: list[str]
) -> None:
    rig = Rig()
    assert [e.address for e in rig.pool.picker.endpoints] == [f"10.0.0.{n}:8000" for n in range(3)]
    headers = Headers.of((wire.TEST_SELECTION, wanted))
    head = ev.RequestHead(headers, "GET", "/", "r", None if subset is None else frozenset(subset))
    handler = ConformanceHandler(rig.director)
    if not chosen:
        with pytest.raises(NoEndpoints):
            handler.decide(head, None)
        return
    routing = handler.decide(head, None)
    assert isinstance(routing, ev.Routing)
    assert (routing.destination, routing.served_header) == (chosen[0], wire.TEST_SERVED)
    handler.finished(routing.token, Outcome())
