"""The static endpoint file: defaults from the rank, and errors that name the path and the row."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sidecar.endpoint_file import EndpointFileError, load_endpoint_file, parse_endpoint_rows
from tests.unit.sidecar.hostile_yaml import HOSTILE

_FULL = {
    "pod": "engine-a",
    "rank": 1,
    "host": "127.0.1.1",
    "serving_port": 8001,
    "metrics_port": 8200,
    "events_port": 5600,
    "replay_port": 0,
    "p2p_port": 7800,
    "labels": {"llm-d.ai/role": "both"},
}


def _document(*rows: object) -> bytes:
    return json.dumps({"endpoints": list(rows)}).encode()


def test_every_field_is_read() -> None:
    (row,) = parse_endpoint_rows(_document(_FULL), "f")
    assert (row.pod, row.rank, str(row.serving)) == ("engine-a", 1, "127.0.1.1:8001")
    assert (row.metrics_port, row.events_port, row.replay_port, row.p2p_port) == (8200, 5600, 0, 7800)
    assert dict(row.labels) == {"llm-d.ai/role": "both"}


def test_absent_ports_follow_from_the_rank() -> None:
    raw = b"endpoints:\n  - {pod: a, rank: 2, host: 127.0.1.1, serving_port: 8002}\n"
    (row,) = parse_endpoint_rows(raw, "f", p2p_base_port=9000)
    assert (row.metrics_port, row.events_port, row.replay_port, row.p2p_port) == (8002, 5559, 5659, 9002)


def test_a_file_of_the_references_file_discovery_is_read_as_it_is() -> None:
    raw = b"""endpoints:
  - {name: vllm-0, namespace: default, address: "10.0.0.1", port: "8000", labels: {llm-d.ai/role: decode}}
  - {name: vllm-1, address: "10.0.0.2", port: 8000}
"""
    first, second = parse_endpoint_rows(raw, "f")
    assert (first.pod, first.rank, str(first.serving)) == ("vllm-0", 0, "10.0.0.1:8000")
    assert (first.events_port, dict(first.labels)) == (5557, {"llm-d.ai/role": "decode"})
    assert (second.pod, str(second.serving)) == ("vllm-1", "10.0.0.2:8000")


@pytest.mark.parametrize("port", ["", "http", "0", "65536", "8000000", "\u0663"])
def test_a_port_that_is_none_is_refused_in_the_references_rows_too(port: str) -> None:
    row = {"name": "vllm-0", "address": "10.0.0.1", "port": port}
    with pytest.raises(EndpointFileError, match=r"endpoints\[0\]: serving_port"):
        parse_endpoint_rows(_document(row), "f")


def test_rows_do_not_mix_both_vocabularies() -> None:
    with pytest.raises(EndpointFileError, match="unknown field 'name'"):
        parse_endpoint_rows(_document({**_FULL, "name": "x"}), "f")


def test_an_ipv4_mapped_host_is_the_ipv4_host() -> None:
    (row,) = parse_endpoint_rows(_document({**_FULL, "host": "::ffff:127.0.1.1"}), "f")
    assert row.host == "127.0.1.1"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pod": ""}, "pod"),
        ({"pod": 7}, "pod"),
        ({"pod": "a\nb ERROR root: forged"}, "pod"),
        ({"pod": "Engine-A"}, "pod"),
        ({"pod": "engine/a"}, "pod"),
        ({"pod": "ä"}, "pod"),
        ({"pod": "a" * 254}, "pod"),
        ({"host": "engine-a"}, "host"),
        ({"host": "0.0.0.0"}, "host"),
        ({"serving_port": None}, "serving_port"),
        ({"serving_port": True}, "serving_port"),
        ({"serving_port": "8000"}, "serving_port"),
        ({"serving_port": 0}, "serving_port"),
        ({"p2p_port": 70000}, "p2p_port"),
        ({"rank": -1}, "rank"),
        ({"labels": ["x"]}, "labels"),
        ({"labels": {"x": 1}}, "labels"),
        ({"port": 8000}, "port"),
    ],
)
def test_a_bad_row_is_named(change: dict[str, object], named: str) -> None:
    good = {**_FULL, "pod": "other", "serving_port": 9000}
    with pytest.raises(EndpointFileError, match=rf"^pool\.yaml: endpoints\[1\]: .*{named}"):
        parse_endpoint_rows(_document(good, {**_FULL, **change}), "pool.yaml")


@pytest.mark.parametrize(
    "change", [{"serving_port": 9000}, {"pod": "other"}], ids=["same identity", "same address"]
)
def test_two_rows_for_one_endpoint_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(EndpointFileError, match=r"endpoints\[1\]: .* is already endpoints\[0\]"):
        parse_endpoint_rows(_document(_FULL, {**_FULL, **change}), "f")


@pytest.mark.parametrize(
    "raw",
    [b"", b"endpoints:", b"[]", b"endpoints: {}", b"a: [", b"endpoints: []\nmore: 1", b"\xff\xfe", b"- a"],
)
def test_a_file_of_another_shape_is_refused_with_its_name(raw: bytes) -> None:
    with pytest.raises(EndpointFileError, match=r"^pool\.yaml: "):
        parse_endpoint_rows(raw, "pool.yaml")


def test_an_empty_pool_is_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("endpoints: []\n")
    assert load_endpoint_file(path) == ()


def test_a_missing_file_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(EndpointFileError, match=r"absent\.yaml: No such file"):
        load_endpoint_file(tmp_path / "absent.yaml")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_refused_with_the_files_name(text: str) -> None:
    raw = text.replace("spec", "endpoints").encode("utf-8", "surrogatepass")
    with pytest.raises(EndpointFileError, match=r"^pool\.yaml: "):
        parse_endpoint_rows(raw, "pool.yaml")


def test_the_longest_pod_name() -> None:
    (row,) = parse_endpoint_rows(_document({**_FULL, "pod": "a.b-" + "9" * 249}), "f")
    assert len(row.pod) == 253


@pytest.mark.timeout(10)
def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pool.yaml")
    with pytest.raises(EndpointFileError, match=r"pool\.yaml: not a regular file"):
        load_endpoint_file(tmp_path / "pool.yaml")
