"""S-H03 through the director: what the engine gets, what is matched, and that pulls respect it."""

from __future__ import annotations

import gzip
import json
import logging
from typing import Any

import pytest

from engine_plugin.identity import EndpointId
from epp.core.errors import BadRequest, UnsupportedBody
from epp.core.types import CacheTier
from epp.extproc.events import Headers, RequestHead, Routing
from epp.request.trusted_salt import TrustedSalt
from sidecar.wire import KV_CACHE_SOURCE_HOST_PORT
from tests.unit.director.rig import BASE, Rig

TRUSTED = TrustedSalt("x-tenant", b"k" * 32)
TEXT = "word " * 400
COMPLETIONS = "/v1/completions"


def salt_of(tenant: str) -> str:
    return TRUSTED.salt_of([tenant])[0]


async def ids_of(rig: Rig, fields: dict[str, Any]) -> list[int]:
    await rig.route(fields, headers=(("x-tenant", "probe"),))
    ids = rig.requests.pop().token_ids
    assert ids is not None
    return list(ids)


async def ask(rig: Rig, tenant: str | None, *, salt: str | None = None, text: str = TEXT) -> Routing:
    fields = {"model": BASE, "prompt": text} | ({"cache_salt": salt} if salt else {})
    return await rig.route(fields, headers=(("X-Tenant", tenant),) if tenant is not None else ())


def matched(rig: Rig) -> dict[str, int]:
    """What the last request found."""
    matches = rig.pool.picker.cache.match(rig.requests[-1], [e.id for e in rig.pool.picker.endpoints])
    return {e.pod: match.cached_tokens for e, match in matches.items() if match.cached_tokens}


async def test_each_tenant_hits_its_own_blocks_and_no_other_ones() -> None:
    rig = Rig(trusted_salt=TRUSTED)
    ids = await ids_of(rig, {"model": BASE, "prompt": TEXT})
    held = rig.hold_ids("a", ids, salt=salt_of("acme"))
    assert held > 0
    await ask(rig, "acme")
    assert matched(rig) == {"a": held}
    attempts: list[tuple[str | None, str | None]] = [
        ("mallory", None),
        ("mallory", salt_of("acme")),  # knows the very salt
        ("mallory", "acme"),
        (None, salt_of("acme")),  # came past whoever sets the header
        ("", salt_of("acme")),
        ("acme2", salt_of("acme")),
        (None, None),
    ]
    for tenant, salt in attempts:
        await ask(rig, tenant, salt=salt)
        assert matched(rig) == {}, (tenant, salt)
    await ask(rig, "acme", salt="of its own")
    assert matched(rig) == {"a": held}
    await rig.tokeniser.aclose()


async def test_negative_control_without_the_flag_whoever_knows_a_salt_shares_its_cache() -> None:
    rig = Rig()
    await ask(rig, "mallory")
    ids = rig.requests[-1].token_ids
    assert ids is not None
    held = rig.hold_ids("a", list(ids), salt="acme")
    await ask(rig, "mallory", salt="acme")
    assert matched(rig) == {"a": held}
    routing = await ask(rig, "mallory", salt="acme")
    assert routing.body is None
    assert "x-tenant" not in routing.remove_headers
    await rig.tokeniser.aclose()


@pytest.mark.parametrize("long", [False, True])  # on the loop, and in a thread
async def test_the_engine_gets_the_salt_and_not_the_header(long: bool) -> None:
    rig = Rig(trusted_salt=TRUSTED)
    text = TEXT * 200 if long else TEXT
    routing = await ask(rig, "acme", salt="mine", text=text)
    assert routing.body is not None
    assert json.loads(routing.body) == {"model": BASE, "prompt": text, "cache_salt": salt_of("acme")}
    assert b"mine" not in routing.body
    assert "x-tenant" in routing.remove_headers
    assert rig.requests[-1].cache_salt == salt_of("acme")
    assert rig.value('kvpull_epp_trusted_salts_total{header="header"}') == 1
    await rig.tokeniser.aclose()


@pytest.mark.parametrize(("tokens", "at_once"), [(1_000, True), (6_000, False)])
async def test_a_body_of_many_tiny_values_is_changed_in_a_thread(tokens: int, at_once: bool) -> None:
    body = json.dumps({"model": BASE, "cache_salt": "mine", "prompt": [1] * tokens}).encode()
    for trusted, expected in ((TRUSTED, at_once), (None, True)):
        rig = Rig(trusted_salt=trusted)
        found = rig.director.decide(
            RequestHead(Headers.of(("x-tenant", "acme")), "POST", COMPLETIONS, "r"), body
        )
        assert isinstance(found, Routing) is expected
        routing = found if isinstance(found, Routing) else await found
        assert (routing.body is None) is (trusted is None)
        await rig.tokeniser.aclose()


async def test_without_the_header_nothing_fails_and_nothing_is_shared() -> None:
    rig = Rig(trusted_salt=TRUSTED)
    sent = [(await ask(rig, None)).body for _ in range(2)]
    salts = {json.loads(body or b"")["cache_salt"] for body in sent}
    assert len(salts) == 2
    assert rig.value('kvpull_epp_trusted_salts_total{header="missing"}') == 2
    headers = (("x-tenant", "acme"), ("X-Tenant", "mallory"))
    await rig.route({"model": BASE, "prompt": "x"}, headers=headers)
    assert rig.requests[-1].cache_salt not in (salt_of("acme"), salt_of("mallory"))
    assert rig.value('kvpull_epp_trusted_salts_total{header="ambiguous"}') == 1
    await rig.tokeniser.aclose()


async def test_a_compressed_body_goes_on_plain_and_says_so() -> None:
    rig = Rig(trusted_salt=TRUSTED)
    body = gzip.compress(json.dumps({"model": BASE, "prompt": TEXT, "cache_salt": "mine"}).encode())
    headers = (("content-encoding", "gzip"), ("x-tenant", "acme"))
    routing = await rig.route({}, body=body, headers=headers)
    assert routing.body is not None
    assert json.loads(routing.body)["cache_salt"] == salt_of("acme")
    assert {"content-encoding", "x-tenant"} <= set(routing.remove_headers)
    assert rig.requests[-1].token_ids is not None
    await rig.tokeniser.aclose()


async def test_a_bodiless_request_loses_the_header_only() -> None:
    rig = Rig(trusted_salt=TRUSTED)
    routing = await rig.route({}, "/v1/models", body=b"", headers=(("x-tenant", "acme"),))
    assert routing.body is None
    assert "x-tenant" in routing.remove_headers


async def test_the_models_name_and_the_salt_are_exchanged_together() -> None:
    rig = Rig(trusted_salt=TRUSTED)
    headers = (("x-tenant", "acme"), ("x-llm-d-model-name-rewrite", "longer-name"))
    routing = await rig.route({"model": BASE, "prompt": "x", "cache_salt": "mine"}, headers=headers)
    assert json.loads(routing.body or b"") == {
        "model": "longer-name",
        "prompt": "x",
        "cache_salt": salt_of("acme"),
    }
    await rig.tokeniser.aclose()


async def test_refusals_are_counted_and_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig = Rig(trusted_salt=TRUSTED)
    for path, body, error in (
        ("/v1/embeddings", b'{"input": "zebra', BadRequest),
        ("/vllm.grpc.engine.VllmEngine/Generate", b"\0\0\0\0\5zebra", UnsupportedBody),
    ):
        with pytest.raises(error) as refused:
            await rig.route({}, path, body=body, headers=(("x-tenant", "zebra"),))
        assert "zebra" not in str(refused.value)
    assert rig.requests == []
    await ask(rig, "zebra", salt="zebra")
    assert "zebra" not in caplog.text + rig.metrics_page()
    assert salt_of("zebra") not in caplog.text + rig.metrics_page() + repr(rig.requests[-1])
    await rig.tokeniser.aclose()


async def test_no_pull_crosses_tenants() -> None:
    """`a` has the prompt in its CPU tier under acme's salt and is too busy to run it: acme's source only."""
    rig = Rig(trusted_salt=TRUSTED)
    ids = await ids_of(rig, {"model": BASE, "prompt": TEXT})
    rig.hold_ids("a", ids, salt=salt_of("acme"), tier=CacheTier.CPU)
    rig.pool.metrics("a", waiting=50.0, model_name=BASE)
    for number in range(9):
        rig.pool.picker.ledger.book(
            f"x{number}",
            serving=EndpointId("a"),
            computing=EndpointId("a"),
            source=None,
            uncached_prompt_tokens=0,
        )
    sources = []
    for tenant, salt in (("mallory", salt_of("acme")), (None, salt_of("acme")), ("acme", "mine")):
        routing = await ask(rig, tenant, salt=salt)
        assert routing.destination != "10.0.0.0:8000"
        sources.append(routing.set_headers.get(KV_CACHE_SOURCE_HOST_PORT))
    assert sources == [None, None, "10.0.0.0:8000"]
    await rig.tokeniser.aclose()
