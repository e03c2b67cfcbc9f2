"""Tables from committed inputs: what is kept is not run again, what is not known is not invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epp.cli import main
from simulator import tables
from simulator.experiment import Experiment
from simulator.kept_results import KeptResults, key_of
from simulator.runner import Job, Result, jobs_of

SPEC = Experiment.model_validate(
    {
        "title": "t",
        "source": "s",
        "protocol": "p",
        "model": "gpt-oss-120b",
        "fleet": {"engines": 2, "gateway_s": 0.0, "primed": True},
        "client": {
            "kind": "rates",
            "prefixes": 2,
            "prefix_tokens": 4096,
            "question_tokens": 64,
            "output_tokens": 8,
            "rates_per_s": [8],
            "stage_s": 6,
        },
        "join": {"at_s": 2},
        "arms": {"load": "load", "load + P2P": "load-p2p"},
        "seeds": 2,
        "variants": {"slow gateway": {"fleet": {"gateway_s": 1.0}}},
    }
)


@pytest.fixture
def one_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "load_experiment", lambda _name: SPEC)


def write(out: Path, kept: KeptResults | None, **changes: bool) -> str:
    found = tables.write_tables(
        out, only=["x"], seeds=None, processes=1, variants=True, kept=kept, run=changes.get("run", True)
    )
    assert [p.name for p in found] == ["x.md", "x.json", "x.svg"]
    return (out / "x.md").read_text()


def test_kept_results_give_the_same_bytes_and_run_nothing(
    tmp_path: Path, one_experiment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(tmp_path / "plain", None)
    kept = tmp_path / "kept.jsonl"
    write(tmp_path / "first", KeptResults(kept))
    assert len(kept.read_text().splitlines()) == 8  # 2 arms x 2 seeds, as committed and under the variant

    def never(self: Job) -> None:
        raise AssertionError("it was kept")

    monkeypatch.setattr(Job, "__call__", never)
    assert write(tmp_path / "second", KeptResults(kept)) == plain
    for name in ("x.json", "x.svg"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_half_of_the_results_say_how_many_seeds_they_are(tmp_path: Path, one_experiment: None) -> None:
    kept = KeptResults(tmp_path / "kept.jsonl")
    for job in jobs_of("x", SPEC, seeds=1, arms=["load"]):
        kept.add(Result(job, job()))
    with (tmp_path / "kept.jsonl").open("a") as file:
        file.write('{"key": "cut o')
    page = write(tmp_path / "out", KeptResults(tmp_path / "kept.jsonl"), run=False)
    assert "| 8 | load | 1 |" in page
    assert "load + P2P" not in page
    assert "the protocol wants 2" in page


def test_newcomers_and_variants_are_shown_where_nothing_was_published(
    tmp_path: Path, one_experiment: None
) -> None:
    page = write(tmp_path, None)
    assert "| newcomer, arm | join_first_request_s |" in page
    assert "| slow gateway | 8 | load + P2P |" in page
    assert "| newcomer, arm (slow gateway) | join_first_request_s |" in page
    rows = json.loads((tmp_path / "x.json").read_text())
    assert {"newcomer", "8"} == set(rows[0]["figures"])


def test_a_ratio_under_another_assumption_has_the_interval_of_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = {"of": "load + P2P", "over": "load", "stage": "8", "figure": "ttft_p50_s"}
    spec = Experiment.model_validate(SPEC.model_dump() | {"ratios": [ratio]})
    monkeypatch.setattr(tables, "load_experiment", lambda _name: spec)
    kept = KeptResults(tmp_path / "kept.jsonl")
    for job in jobs_of("x", spec, variants=True):
        of = {"load": 1.0, "load + P2P": 2.0 + job.seed + 10 * bool(job.variant)}[job.arm]
        kept.add(Result(job, {"8": dict.fromkeys([*tables._ALWAYS, "ttft_p50_s"], of)}))
    page = write(tmp_path / "out", kept, run=False)
    assert "| as committed | 3.500 ±6.355 |" in page  # 3 and 4
    assert "| slow gateway | 13.5 ±6.4 |" in page


def test_another_seed_policy_or_size_is_another_result() -> None:
    base = Job("x", SPEC, "load", 1)
    others = [
        Job("x", SPEC, "load", 2),
        Job("x", SPEC, "load + P2P", 1),
        Job("x", SPEC, "load", 1, "slow gateway"),
        Job("x", SPEC.varied({"fleet": {"engines": 3}}), "load", 1),
    ]
    assert len({key_of(job) for job in [base, *others]}) == 5
    renamed = SPEC.model_copy(update={"title": "another", "seeds": 9})
    assert key_of(Job("y", renamed, "load", 1)) == key_of(base)


def test_rendering_without_results_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "tables", "--out", "nowhere", "--render"]) == 2
    assert "--render needs --keep" in capsys.readouterr().err
