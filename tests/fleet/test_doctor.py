"""`kvpull doctor` on fleets with one thing wrong each: it names exactly that, and nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.local.fleet import running_fleet
from deploy.local.spec import FleetSpec
from tests.fleet.small import doctor, small_spec

_BLOCK, _OFFSET = "127.0.45", 4500
_ILL = "engine-c"
_WRONG_P2P_PORT = 7777 + _OFFSET + 91

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(180)]


async def _examined(spec: FleetSpec) -> tuple[int, list[str]]:
    """Exit status, and the secrets that the answer must not repeat."""
    async with running_fleet(spec, lambda _: None) as fleet:
        status = await doctor(fleet, "--json")
        return status, [fleet.debug_token_file.read_text(), fleet.routing_key_file.read_text()]


@pytest.mark.parametrize(
    ("ill", "check", "evidence", "remedy"),
    [
        ({"hash_seed": "another"}, "hash seeds", "seed_fp is ", "PYTHONHASHSEED"),
        ({"block_size": 32}, "block sizes", "block_size is 32, of the others 16", "--block-size"),
        (
            {"publishes_events": False},
            "subscriptions",
            "its engine publishes no KV events",
            "--kv-events-config",
        ),
        (
            {"listed_p2p_port": _WRONG_P2P_PORT},
            "ports",
            f"sent to {_BLOCK}.3:{_WRONG_P2P_PORT}, its engine listens on {_BLOCK}.3:{7777 + _OFFSET}",
            "p2p_port",
        ),
        (
            {"old_transfer_keys": True},
            "key names",
            "its sidecar sent kv_transfer_params.remote_kv_source, its engine did not take it",
            "older ones: p2p",
        ),
    ],
    ids=["wrong seed", "wrong block size", "no events", "wrong P2P port", "old key names"],
)
def test_the_one_fault_is_named(
    ill: Mapping[str, Any],
    check: str,
    evidence: str,
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, secrets = asyncio.run(_examined(small_spec(tmp_path, _BLOCK, _OFFSET, {_ILL: ill})))
    said = capsys.readouterr()
    document = json.loads(said.out)
    findings = [(c["name"], f) for c in document["checks"] for f in c["findings"]]
    found = [(name, f) for name, f in findings if f["verdict"] == "fault"]
    assert [(name, f["place"]) for name, f in found] == [(check, f"{_ILL}/0")]
    assert {name for name, _ in findings} <= {check, "shared memory"}, "that one is the machine's"
    assert evidence in found[0][1]["evidence"]
    assert remedy in found[0][1]["remedy"]
    assert status == 1
    assert document["healthy"] is False
    assert not any(secret in said.out + said.err for secret in secrets)
