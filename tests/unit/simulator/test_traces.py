"""Recorded traffic: equal ids become equal tokens, and a mistake is refused with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from epp.core.errors import ConfigError
from simulator.benchmark_profile import ReplayedConversations, read_profile
from simulator.clients import RateStages
from simulator.traces import TokenBook, TraceReplay, TraceRequest, fit_into, from_zero, read_trace
from tests.unit.simulator.world import AFFINITY, fleet

ROWS = [
    {"timestamp": 500, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]},
    {"timestamp": 2500, "input_length": 1500, "output_length": 4, "hash_ids": [1, 2, 9]},
]


def mooncake(tmp_path: Path, rows: list[object]) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_mooncake_trace_shares_what_its_ids_share(tmp_path: Path) -> None:
    first, second = read_trace(mooncake(tmp_path, ROWS))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.5, 1100, 4)
    book = TokenBook(1)
    one, two = book.text(first), book.text(second)
    assert (len(one), len(two)) == (1104, 1504)
    assert one[:1024] == two[:1024]
    assert one[1024:1100] != two[1024:1100]


def test_its_requests_arrive_when_it_says_and_reuse_the_prefix(tmp_path: Path) -> None:
    requests = from_zero(read_trace(mooncake(tmp_path, ROWS)))
    one = fleet(AFFINITY, engines=1)
    (stage,) = TraceReplay(requests, speed=2.0).run(one, 1)
    assert [r.sent_s for r in stage.records] == [0.0, 1.0]
    assert stage.records[1].device_hit_tokens == 1024
    one.check()


def test_a_session_goes_on_after_its_answer_and_its_pause(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    rows = [
        {"t": 0.0, "type": "n", "in": 640, "out": 8, "hash_ids": list(range(10)), "think_time": 0.0},
        {"type": "subagent", "requests": []},
        {"t": 50.0, "type": "n", "in": 704, "out": 8, "hash_ids": list(range(11)), "think_time": 30.0},
    ]
    path.write_text(json.dumps({"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": rows}))
    requests = read_trace(path)
    one = fleet(AFFINITY, engines=1)
    (stage,) = TraceReplay(requests, max_think_s=5.0).run(one, 1)
    first, second = stage.records
    assert first.ended_s is not None
    assert second.sent_s == pytest.approx(first.ended_s + 5.0)
    assert second.device_hit_tokens == 640  # 704 tokens: the last block is computed


def test_local_ids_of_two_sessions_never_meet(tmp_path: Path) -> None:
    for name in ("a", "b"):
        row = {"t": 0.0, "in": 64, "out": 1, "hash_ids": [1]}
        body = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": [row]}
        (tmp_path / f"{name}.json").write_text(json.dumps(body))
    one, two = read_trace(tmp_path)
    book = TokenBook(1)
    assert book.text(one)[:64] != book.text(two)[:64]


def test_a_session_ends_where_it_outgrows_the_engine() -> None:
    def row(prompt: int, session: str = "s") -> TraceRequest:
        return TraceRequest(0.0, (), 64, prompt, 10, session)

    kept, dropped = fit_into([row(100), row(5_000), row(200), row(300, "other"), row(9_000, "")], 1_000)
    assert [r.prompt_tokens for r in kept] == [100, 300]
    assert dropped == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"timestamp": 1, "input_length": 2}, "output_length"),
        ({"timestamp": 1, "input_length": -2, "output_length": 1, "hash_ids": []}, "input_length"),
        ({"timestamp": True, "input_length": 2, "output_length": 1, "hash_ids": []}, "timestamp"),
        ({"timestamp": 1, "input_length": 2, "output_length": 1}, "hash_ids"),
        ([1], "expected an object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(mooncake(tmp_path, [ROWS[0], row]))
    assert "trace.jsonl:2" in str(error.value)


def test_no_trace_at_all_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.jsonl", mooncake(tmp_path, [])):
        with pytest.raises(ConfigError):
            read_trace(path)


PROFILE = """
load:
  type: concurrent
  request_timeout: 30
  stages:
  - num_requests: 12
    concurrency_level: 2
data:
  type: conversation_replay
  conversation_replay:
    max_model_len: 4000
    num_conversations: 3
    shared_system_prompt_len: 128
    dynamic_system_prompt_len: {type: lognormal, min: 1000, max: 1000, mean: 1000, std_dev: 1}
    turns_per_conversation: {type: lognormal, min: 2, max: 4, mean: 3, std_dev: 1}
    input_tokens_per_turn: {type: lognormal, min: 50, max: 50, mean: 50, std_dev: 1}
    output_tokens_per_turn: {type: lognormal, min: 10, max: 10, mean: 10, std_dev: 1}
    tool_call_latency_sec: {type: lognormal, min: 1, max: 2, mean: 1, std_dev: 1}
"""


def test_a_conversation_profile_runs_as_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml.in"
    path.write_text(PROFILE)
    profile = read_profile(path)
    assert isinstance(profile, ReplayedConversations)
    one = fleet(AFFINITY, engines=1)
    (stage,) = profile.run(one, 1)
    assert {r.prompt_tokens for r in stage.records if r.tag == "turn 0"} == {128 + 1000 + 50}
    assert 6 <= len(stage.records) <= 12
    assert max(r.prompt_tokens for r in stage.records) <= 4000


def test_a_shared_prefix_profile_becomes_stages(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(
        "load: {type: constant, stages: [{rate: 2, duration: 50}, {rate: 5, duration: 20}]}\n"
        "data: {type: shared_prefix, shared_prefix: {num_groups: 32, system_prompt_len: 2048,"
        " question_len: 256, output_len: 128}}\n"
    )
    stages = RateStages(32, 2048, 256, 128, (2.0, 5.0), (50.0, 20.0), counted=True, dealt=True)
    assert read_profile(path) == stages
    path.write_text(path.read_text().replace("constant", "poisson"))
    assert read_profile(path) == replace(stages, counted=False)


@pytest.mark.parametrize("text", ["[]", "data: {type: other}\nload: {}", "load: {}", "data: {type: [}"])
def test_another_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.yaml"):
        read_profile(path)
