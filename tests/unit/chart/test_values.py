"""values.yaml: everything in it is described, has an effect, and nothing else is accepted."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from deploy.helm import describe
from tests.kube import chart
from tests.kube.chart import CHART, ChartRefused

VALUES = describe.read_values((CHART / "values.yaml").read_text())
TEMPLATES = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
# read through a variable that the templates give another name
READ_WHOLE = {"global", "router.modelServers.type", "router.modelServers.protocol", "router.proxy.proxyType"}
READ_WHOLE |= {"router.monitoring.prometheus.auth.enabled", "router.tokenizer.image.registry"}


def groups(values: tuple[describe.Value, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for value in values:
        found += [path for path in groups(value.children) if path] if value.is_group else []
        found += [value.path] if value.is_group else []
    return found


def leaves(values: tuple[describe.Value, ...]) -> list[describe.Value]:
    return [leaf for v in values for leaf in (leaves(v.children) if v.is_group else [v])]


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    result: dict[str, Any] = value
    return result


def test_schema_and_readme_are_fresh() -> None:
    """Else run `python -m deploy.helm.describe`."""
    assert (CHART / "values.schema.json").read_text() == describe.schema_text(VALUES)
    assert (CHART / "README.md").read_text() == describe.readme_text(VALUES)


def test_a_misspelt_name_is_refused_wherever_it_stands() -> None:
    everywhere = [nested((*path, "replicaz"), 1) for path in groups(VALUES)]
    with pytest.raises(ChartRefused) as refused:
        chart.minimal(chart.merged(*everywhere))
    places = re.findall(r"at '(\S*)': additional properties 'replicaz' not allowed", str(refused.value))
    assert sorted(places) == sorted("/".join(("", *path)) for path in groups(VALUES))
    assert len(places) > 30


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("router.epp.replicas", "two"),
        ("router.epp.replicas", -1),
        ("router.epp.extProcPort", 99999),
        ("router.epp.secureServing", "false"),
        ("router.epp.image.digest", "sha256:12"),
        ("router.epp.pluginsCustomConfig", {"a.yaml": 3}),
        ("router.epp.volumeMounts", [{"name": "a", "mountPath": "/a", "subPath": "x"}]),
        ("router.modelServers.targetPorts", []),
        ("router.modelServers.targetPorts", [{"number": 1, "name": "x"}]),
        ("router.modelServers.targetPorts", [{"number": 8000}, {"number": 8000}]),
        ("router.modelServers.type", "sglang"),
        ("provider.name", "nginx"),
        ("engine.sizing.kvBytesPerToken", 0),
        ("httpRoute.requestTimeout", "5 minutes"),
        ("router.monitoring.prometheus.auth.enabled", True),
    ],
)
def test_a_value_of_a_wrong_form_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ChartRefused, match=path.replace(".", "/")):
        chart.minimal(nested(tuple(path.split(".")), value))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"router": {"modelServers": {"matchLabels": {}}}}, "give the labels of the engines' pods"),
        ({"router": {"tokenizer": {"enabled": True}}}, "name the model that the tokenizer loads"),
        ({"router": {"epp": {"certSecret": "x", "secureServing": False}}}, "certSecret needs"),
        ({"router": {"epp": {"metricsTls": {"clientCaSecret": "x"}}}}, "clientCaSecret needs"),
        ({"router": {"epp": {"metricsTls": {"certSecret": "x"}}}}, "doctor.tlsSecret has to say"),
        ({"router": {"epp": {"lameDuckSeconds": 200}}}, "lameDuckSeconds is part of drainTimeoutSeconds"),
        ({"router": {"epp": {"autoscaling": {"minReplicas": 9}}}}, "minReplicas is above maxReplicas"),
        ({"router": {"epp": {"haMode": "active-passive", "autoscaling": {"enabled": True}}}}, "only one"),
        ({"router": {"objectivesGroup": "", "inferenceObjectives": [{"name": "a"}]}}, "objectivesGroup"),
        ({"router": {"proxy": {"enabled": True}}, "provider": {"name": "istio"}}, "leave provider.name none"),
        ({"provider": {"istio": {"stripRoutingHeaders": {"enabled": True}}}}, "labels of the gateway's pods"),
        ({"router": {"epp": {"flags": {"cache-salt-header": "x-tenant"}}}}, "needs FailClose"),
        ({"calibration": {"enabled": True}}, "give source and destination"),
        (
            {"calibration": {"apply": True}, "thresholds": {"spec": {"default": {}}}},
            "leave thresholds.spec empty",
        ),
        ({"engine": {"enabled": True}}, "engine.modelName: name the model"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ChartRefused, match=told):
        chart.render(chart.merged({} if "matchLabels" in str(values) else chart.MINIMAL, values))


def test_every_value_is_read_by_a_template() -> None:
    unread = [
        leaf.path
        for leaf in leaves(VALUES)
        if not re.search(rf"\.{leaf.path[-1]}\b", TEMPLATES) and ".".join(leaf.path) not in READ_WHOLE
    ]
    assert unread == []


def test_the_defaults_are_valid_for_their_own_schema() -> None:
    everything = [nested(leaf.path, copy.deepcopy(leaf.default)) for leaf in leaves(VALUES)]
    assert chart.kinds(chart.render(chart.merged(*everything, chart.MINIMAL))) == chart.kinds(chart.minimal())


def test_a_map_that_nobody_describes_is_an_error() -> None:
    with pytest.raises(describe.DescribeError, match=r"a\.b: an empty map needs"):
        describe.read_values("a:\n  b: {}\n")


def test_comments_become_descriptions_and_schemas() -> None:
    text = "# Words\n# in two lines. @ {minimum: 3}\na: 4\nb: x\n# Group.\nc:\n  # Inner.\n  d: true\n"
    values = describe.read_values(text)
    properties = describe.schema_of(values)["properties"]
    assert properties["a"] == {"description": "Words in two lines.", "type": "integer", "minimum": 3}
    assert properties["b"] == {"type": "string"}
    assert properties["c"]["properties"]["d"] == {"description": "Inner.", "type": "boolean"}
    assert "| `c.d` | `true` | Inner. |" in describe.readme_text(values)
    json.loads(describe.schema_text(values))
