"""Who may route: signatures, legs between sidecars, members that come and go."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidecar import wire
from sidecar.routing_auth import RoutingClaims, sign_routing
from tests.integration.sidecar.doubles import RecordingEngine, recording_engine
from tests.integration.sidecar.rig import COMPLETIONS, PORT, Rig, own_host, proxied, row, running, until

KEY = b"a key of the pool, 32 bytes long"
NOTHING: Mapping[str, str] = {}
PREFILL, SOURCE = wire.PREFILLER_HOST_PORT, wire.KV_CACHE_SOURCE_HOST_PORT


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "routing-key"
    path.write_bytes(KEY + b"\n")
    return str(path)


def _signed(rig: Rig, routing: Mapping[str, str] = NOTHING, *, age_s: float = 0.0) -> dict[str, str]:
    claims = RoutingClaims("req-1", rig.address, routing.get(PREFILL, ""), routing.get(SOURCE, ""))
    auth = sign_routing(KEY, claims, now_s=time.time() - age_s)
    return {wire.REQUEST_ID: "req-1", wire.ROUTING_AUTH: auth, **routing}


# --- signatures -----------------------------------------------------------------------------------


async def test_signed_headers_are_followed(tmp_path: Path, key_file: str) -> None:
    peer = own_host()
    flags = ("--routing-key-file", key_file)
    async with (
        recording_engine(own_host()) as engine,
        running(tmp_path, engine, *flags, pool=[row(peer, 8000)]) as rig,
    ):
        await rig.post(COMPLETIONS, b"{}", **_signed(rig, {SOURCE: f"{peer}:8000"}))
        assert engine.last.json["kv_transfer_params"]["remote_kv_source"]["remote_host"] == peer
        assert not engine.last.values(wire.ROUTING_AUTH)


@pytest.mark.parametrize(
    ("change", "age_s", "reason"),
    [
        ({wire.ROUTING_AUTH: ""}, 0.0, "unsigned"),
        ({wire.ROUTING_AUTH: "1.00"}, 0.0, "signature_wrong"),
        ({wire.REQUEST_ID: "another"}, 0.0, "signature_wrong"),
        ({}, 120.0, "signature_stale"),
    ],
)
async def test_any_other_routing_header_is_void(
    tmp_path: Path, key_file: str, change: dict[str, str], age_s: float, reason: str
) -> None:
    peer = own_host()
    flags = ("--routing-key-file", key_file)
    async with (
        recording_engine(own_host()) as engine,
        running(tmp_path, engine, *flags, pool=[row(peer, 8000)]) as rig,
    ):
        routing = {SOURCE: f"{peer}:8000", PREFILL: f"{peer}:8000"}
        headers = _signed(rig, routing, age_s=age_s) | change
        answer = await rig.post(COMPLETIONS, b"{}", **headers)
        assert (answer.status, engine.last.body) == (200, b"{}")
        assert rig.value("pulls_skipped_total", reason=reason) == 1
        assert rig.value("routing_headers_dropped_total", header=PREFILL, reason=reason) == 1


@pytest.mark.parametrize("named", [True, False])
async def test_a_signed_fallback_list_counts_where_it_names_this_sidecar(
    tmp_path: Path, key_file: str, named: bool
) -> None:
    peer = own_host()
    flags = ("--routing-key-file", key_file)
    async with (
        recording_engine(own_host()) as engine,
        running(tmp_path, engine, *flags, pool=[row(peer, 8000)]) as rig,
    ):
        destination = f"127.0.9.9:8000,{rig.address if named else peer}"
        claims = RoutingClaims("req-1", destination, "", f"{peer}:8000")
        headers = {
            wire.REQUEST_ID: "req-1",
            wire.DESTINATION: destination,
            wire.ROUTING_AUTH: sign_routing(KEY, claims, now_s=time.time()),
            SOURCE: f"{peer}:8000",
        }
        await rig.post(COMPLETIONS, b"{}", **headers)
        assert ("kv_transfer_params" in engine.last.json) is named


# --- legs between sidecars --------------------------------------------------------------------------


@dataclass
class Fleet:
    """Two engines, each behind its sidecar: the prefill leg goes through the peer's sidecar."""

    prefill: RecordingEngine
    decode: RecordingEngine
    prefill_rig: Rig
    decode_rig: Rig


@asynccontextmanager
async def fleet(tmp_path: Path, *flags: str) -> AsyncIterator[Fleet]:
    first, second = own_host(), own_host()
    pool = [row(first, PORT, p2p_port=7801), row(second, PORT, p2p_port=7802)]
    async with (
        recording_engine(first) as prefill,
        recording_engine(second) as decode,
        running(tmp_path, prefill, *flags, host=first, pool=pool) as prefill_rig,
        running(tmp_path, decode, *flags, host=second, pool=pool) as decode_rig,
    ):
        yield Fleet(prefill, decode, prefill_rig, decode_rig)


@pytest.mark.parametrize("with_key", [False, True])
async def test_a_prefill_leg_passes_the_peers_sidecar(tmp_path: Path, key_file: str, with_key: bool) -> None:
    flags = ("--routing-key-file", key_file) if with_key else ()
    decision_id = str(uuid.uuid4())
    async with fleet(tmp_path, *flags) as f:
        headers = _signed(f.decode_rig, {PREFILL: f.prefill_rig.address})
        await f.decode_rig.post(COMPLETIONS, {"prompt": "p"}, **headers, **{wire.DECISION_ID: decision_id})
        expected = {"remote_decoder": {"kv_request_id": decision_id}}
        await until(lambda: len(f.prefill.received) == 1)
        assert f.prefill.last.json["kv_transfer_params"] == expected
        assert not any(f.prefill.last.values(name) for name in wire.ROUTING_HEADERS)
        handed = f.decode.last.json["kv_transfer_params"]["remote_prefiller"]
        assert (handed["remote_host"], handed["remote_port"]) == (f.prefill_rig.host, 7801)
        assert handed["kv_request_id"] == decision_id


async def test_without_a_key_a_members_address_vouches_for_a_leg(tmp_path: Path) -> None:
    hostile = {"prompt": "p", "kv_transfer_params": {"remote_kv_source": {"remote_host": "10.6.6.6"}}}
    async with proxied(tmp_path, pool=[row("127.0.0.1", PORT)]) as (engine, rig):
        await rig.post(COMPLETIONS, hostile, **{wire.LEG: wire.LEG_PREFILL})
        assert engine.last.json == hostile


async def test_with_a_key_a_leg_has_to_be_signed_as_one(tmp_path: Path, key_file: str) -> None:
    hostile = {"prompt": "p", "kv_transfer_params": {"remote_kv_source": {"remote_host": "10.6.6.6"}}}
    flags = ("--routing-key-file", key_file)
    async with (
        recording_engine(own_host()) as engine,
        running(tmp_path, engine, *flags, pool=[row("127.0.0.1", PORT)]) as rig,
    ):
        for headers in ({}, _signed(rig)):
            await rig.post(COMPLETIONS, hostile, **headers, **{wire.LEG: wire.LEG_PREFILL})
            assert engine.last.json == {"prompt": "p"}


# --- members that come and go -----------------------------------------------------------------------


async def test_the_running_sidecar_takes_a_changed_file(tmp_path: Path) -> None:
    peer = own_host()
    async with proxied(tmp_path) as (engine, rig):
        await rig.post(COMPLETIONS, b"{}", **{SOURCE: f"{peer}:8000"})
        assert engine.last.body == b"{}"
        rig.pool_file.write_text(json.dumps({"endpoints": [row(peer, 8000, p2p_port=7999)]}))
        await until(lambda: rig.value("members") == 1)
        await rig.post(COMPLETIONS, b"{}", **{SOURCE: f"{peer}:8000"})
        assert _source_of(engine)["remote_port"] == 7999


async def test_without_protection_ports_follow_from_the_rank(tmp_path: Path) -> None:
    flags = ("--enable-ssrf-protection=false", "--data-parallel-size", "2", "--p2p-connector-port", "7700")
    async with recording_engine(own_host()) as engine, running(tmp_path, engine, *flags) as rig:
        await rig.post(COMPLETIONS, b"{}", **{SOURCE: "10.9.9.9:8001"})
        assert _source_of(engine) | {"kv_request_id": ""} == {
            "kv_request_id": "",
            "remote_host": "10.9.9.9",
            "remote_port": 7701,
        }


def _source_of(engine: RecordingEngine) -> dict[str, Any]:
    found: dict[str, Any] = engine.last.json["kv_transfer_params"]["remote_kv_source"]
    return found
