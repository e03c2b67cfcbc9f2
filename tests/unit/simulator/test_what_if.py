"""`kvpull simulate`: the answer, the files, and that equal questions get equal bytes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from epp.cli import main
from epp.core.errors import ConfigError
from simulator.experiment import experiment_names, load_experiment, load_policy
from simulator.runner import jobs_of, run_jobs
from simulator.summary import Estimate
from simulator.svg import bar_chart, line_chart
from simulator.tables import measure, ratio_rows
from simulator.what_if import (
    AS_CONFIGURED,
    COST,
    NO_PULLS,
    Arm,
    ArmResult,
    settings_of,
    threshold_of,
    verdict,
)
from tests.unit.simulator.world import LOAD_FIRST, PROFILE


def trace(path: Path) -> Path:
    """Four prompts of 8K tokens, asked again and again."""
    rows = [
        {
            "timestamp": 150 * n,
            "input_length": 8192,
            "output_length": 16,
            "hash_ids": [16 * (n % 4) + i for i in range(16)],
        }
        for n in range(48)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(tmp_path: Path, out: str, *more: str) -> int:
    config = tmp_path / "config.yaml"
    config.write_text(LOAD_FIRST)
    fleet = ["--engines", "3", "--device-tokens", "60000", "--cpu-tokens", "90000", "--seeds", "2"]
    where = ["--config", str(config), "--trace", str(trace(tmp_path / "trace.jsonl"))]
    return main(["simulate", *where, *fleet, "--out", str(tmp_path / out), *more])


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one answer."""
    path = tmp_path_factory.mktemp("what-if")
    assert ask(path, "one") == 0
    return path


def test_a_what_if_answers_in_a_sentence_a_page_and_json(answered: Path) -> None:
    found = json.loads((answered / "one/report.json").read_text())
    assert found["verdict"]["sentence"] in (answered / "one/report.html").read_text().replace("&gt;", ">")
    arms = found["arms"]
    assert arms[NO_PULLS]["figures"]["pulls"]["mean"] == 0
    assert arms[NO_PULLS]["source_reasons"] == {"switched_off": 48}
    assert arms["threshold 2,048"]["figures"]["pulls"]["mean"] > 0
    assert arms["threshold 16,384"]["figures"]["pulls"]["mean"] == 0  # no prompt is that long
    assert found["verdict"]["pays"] is True
    computed = {name: arm["figures"]["computed_share"]["mean"] for name, arm in arms.items()}
    assert computed["threshold 2,048"] < computed[NO_PULLS]
    for arm in arms.values():
        assert sum(arm["requests_by_endpoint"].values()) == 48


def test_the_same_question_gets_the_same_bytes_on_any_number_of_processes(answered: Path) -> None:
    ask(answered, "two", "--jobs", "2")
    for name in ("report.json", "report.html"):
        assert (answered / "one" / name).read_bytes() == (answered / "two" / name).read_bytes()


def test_the_page_is_one_file_that_opens_offline(answered: Path) -> None:
    page = (answered / "one/report.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)|(?:src|href)=|url\(|@import", page)
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    plots = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(plots) >= 4
    for plot in plots:
        ElementTree.fromstring(plot)
    HTMLParser().feed(page)


def test_what_is_missing_or_wrong_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "--config and --trace" in capsys.readouterr().err
    assert ask(tmp_path, "one", "--model", "gpt-5") == 2
    assert "no model 'gpt-5'" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("kind: Other")
    arguments = ["--config", str(tmp_path / "config.yaml"), "--trace", str(tmp_path / "trace.jsonl")]
    assert main(["simulate", *arguments]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_arms_say_what_a_thresholds_document_would() -> None:
    assert threshold_of("threshold 4,096") == 4096
    off, cost = settings_of(NO_PULLS, PROFILE), settings_of(COST, PROFILE)
    assert off is not None
    assert off.enabled is False
    assert cost is not None
    assert cost.recompute_seed is not None
    assert cost.recompute_seed.at_ms(8192) == pytest.approx(PROFILE.timing.recompute_ms(8192))


def arm(name: str, ttft_s: float, pulls: float = 5.0, spread_s: float = 0.001, seeds: int = 3) -> Arm:
    mean = Estimate(ttft_s, spread_s, seeds)
    values = dict.fromkeys(("ttft_mean_s", "ttft_p50_s", "ttft_p99_s"), mean)
    values |= {"pulls": Estimate(pulls, 0.0, seeds), "rate_per_s": Estimate(4.0 / ttft_s, 0.0, seeds)}
    return Arm(name, values, ArmResult({}, (), {}, {}))


@pytest.mark.parametrize(
    ("ttft_s", "spread_s", "seeds", "pays", "said"),
    [
        (1.0, 0.1, 3, True, "clearly pulls pay here"),
        (1.0, 0.6, 3, False, "the intervals overlap, so no gain is shown"),
        (1.0, 0.0, 1, True, "with --seeds 3 it is known how surely"),
        (1.98, 0.0, 1, False, "no gain is shown, less than 2%"),
        (1.98, 0.001, 3, False, "no gain is shown, less than 2%"),
        (2.5, 0.0, 3, False, "no gain is shown"),
    ],
)
def test_what_one_seed_or_one_percent_shows_is_not_called_clear(
    ttft_s: float, spread_s: float, seeds: int, pays: bool, said: str
) -> None:
    without = arm(NO_PULLS, 2.0, 0.0, spread_s, seeds)
    found = verdict([arm(AS_CONFIGURED, ttft_s, spread_s=spread_s, seeds=seeds), without])
    assert found.pays is pays
    assert found.sentence.endswith(f"{said}.")
    assert f"({ttft_s / 2 - 1:+.0%}; p50 {ttft_s / 2 - 1:+.0%}, p99 " in found.sentence


def test_among_equals_the_configuration_stays_and_then_the_highest_threshold_wins() -> None:
    without = arm(NO_PULLS, 2.0, 0.0)
    lower, higher = arm("threshold 2,048", 1.0), arm("threshold 8,192", 1.01)
    found = verdict([arm(AS_CONFIGURED, 1.5), without, lower, higher, arm("threshold 16,384", 1.2)])
    assert (found.best, found.threshold_tokens, found.pays) == ("threshold 8,192", 8192, True)
    assert verdict([arm(AS_CONFIGURED, 1.0), without, lower]).best == AS_CONFIGURED
    slower = verdict([arm(AS_CONFIGURED, 2.1), without])
    assert (slower.best, slower.pays) == (AS_CONFIGURED, False)
    nothing = verdict([arm(AS_CONFIGURED, 1.0, pulls=0.0), without])
    assert (nothing.best, nothing.pays) == (NO_PULLS, False)


# --- plots and tables ---------------------------------------------------------------------------------------
def test_plots_are_well_formed_whatever_the_names_and_values() -> None:
    nan = float("nan")
    lines = line_chart('<&">', "x", "y", {"a<b": [(0.0, 1.0), (nan, 2.0), (3.0, 4.0)], "none": []}, True)
    bars = bar_chart("t", "s", ["g&1", "g2"], {"one": [(1.0, 0.2), (nan, 0.0)], "two": [(0.0, 0.0)] * 2})
    for text in (lines, bars):
        ElementTree.fromstring(text)
        assert "nan" not in text.lower()


def test_what_never_happened_under_one_seed_has_no_mean() -> None:
    assert str(Estimate.of([1.0, float("nan")]).mean) == "nan"
    assert Estimate.of([1.0, 3.0]).mean == 2.0


@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_can_be_run_as_committed(name: str) -> None:
    spec = load_experiment(name)
    for arm in spec.arms.values():
        load_policy(arm.policy)
    for variant, changes in spec.variants.items():
        assert changes.keys() <= {"fleet", "client", "model"}, variant
        spec.varied(changes)
    for row in spec.published:
        assert row.arm in spec.arms
    published = {(p.arm, p.stage, p.figure) for p in spec.published}
    for ratio in spec.ratios:
        for arm in (ratio.of, ratio.over):
            assert (arm, ratio.stage, ratio.figure) in published
    assert spec.protocol
    assert spec.source


def test_ratios_compare_what_was_published_with_what_was_simulated() -> None:
    spec = load_experiment("llama-rates")
    small = spec.varied({"client": {"rates_per_s": [4], "stage_s": 3, "warm_up_s": 0, "prefixes": 3}})
    jobs = jobs_of("llama-rates", small, seeds=1, arms=["without", "with"])
    first, second = run_jobs(jobs, 1), run_jobs(jobs, 1)
    assert first == second
    (row,) = ratio_rows(small, measure(first))
    assert row.published == pytest.approx(0.93 / 1.12)
    measured = measure(first)
    key = ("4", "latency_p50_s")
    assert row.simulated == measured["with", *key].mean / measured["without", *key].mean


def test_an_unknown_experiment_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="llama-rates"):
        load_experiment("nothing")
