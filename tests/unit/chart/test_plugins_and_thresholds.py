"""The configuration that is rendered loads; thresholds are apart from it and roll nothing."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from epp.config import EppConfig, parse_config
from epp.thresholds.document import parse_document
from tests.kube import chart
from tests.kube.chart import CASES, CHART, ChartRefused, Manifest

SHIPPED = tuple(sorted(path.name for path in (CHART / "files" / "plugins").glob("*.yaml")))
CUSTOM = (CHART.parents[2] / "config" / "epp" / "load-first.yaml").read_text()


def loaded(manifests: list[Manifest]) -> EppConfig:
    """What the picker would start with."""
    argument = next(a for a in chart.container(manifests, "epp")["args"] if a.startswith("--config-file="))
    name = argument.rpartition("/")[2]
    return parse_config(chart.find(manifests, "ConfigMap", "-config")["data"][name], name)


def template_of(manifests: list[Manifest]) -> Any:
    return chart.find(manifests, "Deployment", "-epp")["spec"]["template"]


@pytest.mark.parametrize("case", CASES)
def test_every_rendered_configuration_loads(case: str) -> None:
    config = loaded(chart.render(chart.case(case)))
    assert config.precise is not None
    assert config.tokens is not None
    assert config.tokens.exact
    assert config.settings.source_producer is not None
    assert (
        config.settings.source_producer.min_cached_token_delta is None
    )  # pulls are the thresholds' business


@pytest.mark.parametrize("name", SHIPPED)
def test_every_file_that_comes_with_the_chart_loads(name: str) -> None:
    assert loaded(chart.minimal({"router": {"epp": {"pluginsConfigFile": name}}})).precise is not None


def test_where_tokens_come_from() -> None:
    tokens = loaded(chart.minimal()).tokens
    assert tokens is not None
    assert tokens.vllm is not None
    assert tokens.vllm.pool
    tokens = loaded(chart.render(chart.case("sidecar-proxy"))).tokens
    assert tokens is not None
    assert tokens.vllm is not None
    assert tokens.vllm.url == "http://localhost:8000"
    standalone = chart.render(chart.case("standalone"))
    tokens = loaded(standalone).tokens
    assert tokens is not None
    assert tokens.local is not None
    assert tokens.local.path == "/tokenizer"
    assert {"name": "tokenizer", "mountPath": "/tokenizer", "readOnly": True} in chart.container(
        standalone, "epp"
    )["volumeMounts"]


def test_a_configuration_of_ones_own_as_text_and_as_a_map() -> None:
    own = {
        "pluginsConfigFile": "mine.yaml",
        "pluginsCustomConfig": {"mine.yaml": CUSTOM, "other.yaml": "x: y"},
    }
    manifests = chart.minimal({"router": {"epp": own}})
    assert loaded(manifests).settings.source_producer is not None
    assert set(chart.find(manifests, "ConfigMap", "-config")["data"]) == {"mine.yaml", "other.yaml"}
    as_map = chart.minimal({"router": {"epp": {"pluginsConfig": yaml.safe_load(CUSTOM)}}})
    assert loaded(as_map).settings.source_producer is not None


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ChartRefused, match=r"mine.yaml is neither in pluginsCustomConfig"):
        chart.minimal({"router": {"epp": {"pluginsConfigFile": "mine.yaml"}}})


def spec(delta: int) -> dict[str, Any]:
    return {"thresholds": {"spec": {"default": {"minCachedTokenDelta": delta}}}}


def test_thresholds_roll_no_pod() -> None:
    """S-G04: the picker reloads them itself."""
    before, after = chart.minimal(spec(1024)), chart.minimal(spec(8192))
    assert chart.find(before, "ConfigMap", "-thresholds") != chart.find(after, "ConfigMap", "-thresholds")
    assert template_of(before) == template_of(after) == template_of(chart.minimal())


def test_plugins_roll_the_pods() -> None:
    """S-G04: they are read at start only."""
    before = chart.minimal()
    after = chart.minimal({"router": {"epp": {"pluginsConfigFile": "load-first.yaml"}}})
    named = chart.minimal({"router": {"epp": {"pluginsCustomConfig": {"default-plugins.yaml": CUSTOM}}}})
    sums = {template_of(m)["metadata"]["annotations"]["checksum/config"] for m in (before, after, named)}
    assert len(sums) == 3


def test_thresholds_are_a_document_that_loads() -> None:
    thresholds = chart.find(chart.render(chart.case("attach")), "ConfigMap", "-thresholds")
    assert thresholds["metadata"]["name"] in str(
        chart.container(chart.render(chart.case("attach")), "epp")["args"]
    )
    for name, text in thresholds["data"].items():
        assert parse_document(text, name) is not None


def test_without_a_spec_the_config_map_is_somebody_elses() -> None:
    names = [m["metadata"]["name"] for m in chart.minimal() if m["kind"] == "ConfigMap"]
    assert names == ["kv-epp-config"]
