"""docs/pulls.md says what the code does: reason codes, the example document, metric names."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry

from epp.core.thresholds import Scope
from epp.core.types import SourceReason
from epp.ops.explain import _REASONS
from epp.telemetry.ledger import DecisionLedger
from epp.telemetry.metrics import PeerRefusals, PickerMetrics, PoolCollector
from epp.telemetry.pull_metrics import PullMetrics
from epp.thresholds.document import parse_document
from epp.thresholds.in_force import ThresholdState
from tests.unit.core.test_endpoint_picker import Pool

PAGE = (Path(__file__).parents[3] / "docs" / "pulls.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_every_reason_is_explained() -> None:
    table = PAGE.split("## Reason codes")[1].split("\n## ")[0]
    codes = {reason.value for reason in SourceReason}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == codes
    assert set(_REASONS) == codes


def test_the_example_is_a_good_document() -> None:
    scopes = set(parse_document(BLOCKS[0], "docs").rules)
    assert scopes == {Scope(), Scope(model="llama-70b"), Scope(role="prefill"), Scope(source_class="far")}


def test_the_alerts_use_metrics_that_exist() -> None:
    pool, registry = Pool(), CollectorRegistry()
    PickerMetrics(registry)
    DecisionLedger(pool.picker, PullMetrics(registry), registry)
    registry.register(PoolCollector(pool.picker, ThresholdState, PeerRefusals()))
    exported = {f.name + ("_total" if f.type == "counter" else "") for f in registry.collect()}
    rules = yaml.safe_load(BLOCKS[1])["groups"][0]["rules"]
    used = {name for rule in rules for name in re.findall(r"kvpull_epp_\w+", rule["expr"])}
    assert len(rules) == 2
    assert used <= exported
    table = PAGE.split("## Metrics")[1].split("```")[0]
    named = set(re.findall(r"`(kvpull_epp_\w+)", table))
    assert named <= exported


def test_every_test_of_the_public_cases_exists() -> None:
    """And every case of scheduling has a row; of transfers those that the decision can do something about."""
    root = Path(__file__).parents[3]
    section = PAGE.split("## Public failure reports")[1]
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", section)
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (root / path).read_text(), re.MULTILINE), (
            f"{path}::{name}"
        )
    cases = set(re.findall(r"^\| (S-[A-Z]\d\d) ", section, re.MULTILINE))
    assert {f"S-D{number:02}" for number in range(1, 17)} <= cases
    assert len(named) >= len(cases)
