"""What the tier is told: its settings, and a request's kv_transfer_params."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_plugin.transport import Limits
from engine_plugin.vllm.tier_config import TierConfig, TierConfigError
from engine_plugin.vllm.transfer_params import Source, TransferParams, parse_transfer_params

KEYS = [
    "remote_kv_source",
    "remote_prefiller",
    "remote_decoder",
    "kv_request_id",
    "remote_host",
    "remote_port",
]
HERE = {"kv_request_id": "id", "remote_host": "10.0.0.1", "remote_port": 7777}


def test_a_key_or_insecure_by_name() -> None:
    with pytest.raises(TierConfigError, match="peer_key_file"):
        TierConfig.parse({})
    with pytest.raises(TierConfigError, match="peer_key_file"):
        TierConfig.parse({"peer_key_file": "/k", "insecure": True})
    assert TierConfig.parse({"insecure": True}).read_peer_keys() == ()


def test_the_key_is_read_without_its_newline_and_must_be_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef\n")
    assert TierConfig.parse({"peer_key_file": str(file)}).read_peer_keys() == (b"0123456789abcdef",)
    file.write_bytes(b"short\n")
    with pytest.raises(TierConfigError, match="line 1 has 5 bytes"):
        TierConfig.parse({"peer_key_file": str(file)}).read_peer_keys()
    with pytest.raises(TierConfigError, match="No such file"):
        TierConfig.parse({"peer_key_file": str(tmp_path / "none")}).read_peer_keys()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"prot": 1}, "unknown setting prot"),
        ({"port": "7777"}, "port must be a whole number"),
        ({"port": True}, "port must be a whole number"),
        ({"port": 70_000}, "no port"),
        ({"host": "0.0.0.0"}, "no address that peers can dial"),
        ({"host": "::"}, "no address that peers can dial"),
        ({"events_port": -1}, "no port"),
        ({"max_extra_ttft_s": 0}, "max_extra_ttft_s"),
        ({"supply_wait_s": "1"}, "supply_wait_s must be a number"),
        ({"prefill_tokens_per_s": -1.0}, "negative"),
        ({"connect": "a:1"}, "list of texts"),
        ({"connect": ["a"]}, "not host:port"),
        ({"chunk_bytes": 100}, "chunk_bytes"),
        ({"faults": ["explode=1"]}, "faults are"),
        ({"revision": 5}, "revision must be a text"),
    ],
)
def test_what_is_refused_and_how_it_is_said(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(TierConfigError, match=said):
        TierConfig.parse({"insecure": True} | setting)


def test_no_wait_for_a_peer_is_longer_than_the_patience() -> None:
    limits = TierConfig.parse({"insecure": True, "max_extra_ttft_s": 0.5}).limits()
    assert {limits.connect_s, limits.handshake_s, limits.progress_s, limits.first_progress_s} == {0.5}
    assert limits.chunk_bytes == Limits().chunk_bytes


def test_a_long_pull_may_take_as_long_as_computing() -> None:
    slow = TierConfig.parse({"insecure": True})
    assert slow.deadline_s(100_000) == 1.0
    known = TierConfig.parse({"insecure": True, "prefill_tokens_per_s": 1000})
    assert known.deadline_s(100) == 1.0
    assert known.deadline_s(8_000) == 8.0


def test_peers_to_connect_to() -> None:
    config = TierConfig.parse({"insecure": True, "connect": ["a.pool:7777", "[::1]:7778"]})
    assert config.connect_addresses() == [("a.pool", 7777), ("::1", 7778)]


SOURCE = Source("id", ("10.0.0.1", 7777), handed_over=False)


@pytest.mark.parametrize(
    ("params", "meant"),
    [
        (None, TransferParams()),
        ({}, TransferParams()),
        ({"do_remote_decode": True}, TransferParams()),
        ({"remote_kv_source": HERE}, TransferParams(SOURCE)),
        ({"remote_prefiller": HERE}, TransferParams(Source("id", ("10.0.0.1", 7777), handed_over=True))),
        ({"remote_decoder": {"kv_request_id": "d"}}, TransferParams(supply_id="d")),
        (
            {"remote_decoder": {"kv_request_id": "d"}, "remote_kv_source": HERE},
            TransferParams(SOURCE, supply_id="d"),
        ),
        ({"remote_prefiller": HERE, "remote_kv_source": HERE}, TransferParams(malformed=True)),
        ("x", TransferParams(malformed=True)),
        ([], TransferParams(malformed=True)),
        ({"remote_kv_source": HERE | {"remote_port": True}}, TransferParams(malformed=True)),
        ({"remote_kv_source": HERE | {"remote_port": 0}}, TransferParams(malformed=True)),
        ({"remote_kv_source": HERE | {"remote_host": ""}}, TransferParams(malformed=True)),
        ({"remote_kv_source": HERE | {"kv_request_id": "a\nb"}}, TransferParams(malformed=True)),
        ({"remote_kv_source": HERE | {"kv_request_id": "a" * 129}}, TransferParams(malformed=True)),
        ({"remote_decoder": {}}, TransferParams(malformed=True)),
        ({"remote_decoder": []}, TransferParams(malformed=True)),
        ({"remote_kv_source": "yes"}, TransferParams(malformed=True)),
    ],
)
def test_transfer_params(params: Any, meant: TransferParams) -> None:
    assert parse_transfer_params(params) == meant


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_no_parameters_stop_the_engine(params: Any) -> None:
    """An exception here would end vLLM's scheduler and with it the engine."""
    parse_transfer_params(params)
