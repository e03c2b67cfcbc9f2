"""Monitors point at real ports; alerts are those that the pages explain; the dashboard is one.

Whether the metrics exist is asked of a running picker (tests/integration/app/test_chart_process.py).
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.kube import chart
from tests.kube.chart import CHART, Manifest

DOCS = CHART.parents[2] / "docs"


def alerts() -> dict[str, Any]:
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def port_names(manifests: list[Manifest], name: str) -> set[str]:
    spec = chart.find(manifests, "Deployment", name)["spec"]["template"]["spec"]
    return {port["name"] for c in chart.containers(spec) for port in c.get("ports", [])}


def test_monitors_scrape_ports_that_exist() -> None:
    manifests = chart.render(chart.case("everything"))
    service = chart.find(manifests, "ServiceMonitor")
    assert service["metadata"]["labels"]["release"] == "prometheus"
    assert service["spec"]["endpoints"] == [{"port": "http-metrics", "path": "/metrics", "interval": "10s"}]
    selected = [
        (found["metadata"]["name"], port["name"])
        for found in manifests
        if found["kind"] == "Service"
        and service["spec"]["selector"]["matchLabels"].items() <= found["metadata"]["labels"].items()
        for port in found["spec"]["ports"]
        if port.get("targetPort") == "http-metrics"
    ]
    assert selected == [("kv-epp", "http-metrics"), ("kv-epp-siblings", "every-picker")]  # scraped once
    pod = chart.find(manifests, "PodMonitor")["spec"]
    scraped = {endpoint["port"] for endpoint in pod["podMetricsEndpoints"]}
    assert scraped == {"engine-http", "sidecar-metrics"} <= port_names(manifests, "-engine")
    labels = chart.find(manifests, "Deployment", "-engine")["spec"]["template"]["metadata"]["labels"]
    assert pod["selector"]["matchLabels"].items() <= labels.items()


def test_managed_prometheus_has_kinds_of_its_own() -> None:
    manifests = chart.render(chart.case("gke"))
    found = [m for m in manifests if m["apiVersion"] == "monitoring.googleapis.com/v1"]
    assert sorted(m["kind"] for m in found) == ["PodMonitoring", "PodMonitoring", "Rules"]
    assert not any(m["apiVersion"] == "monitoring.coreos.com/v1" for m in manifests)


def test_the_alerts_of_the_page_are_the_chart_s() -> None:
    page = re.findall(r"```yaml\n(groups:.*?)```", (DOCS / "pulls.md").read_text(), re.DOTALL)[0]
    documented = {rule["alert"]: rule for rule in yaml.safe_load(page)["groups"][0]["rules"]}
    assert documented.items() <= alerts().items()
    rendered = chart.find(chart.render(chart.case("everything")), "PrometheusRule")["spec"]
    assert {rule["alert"] for rule in rendered["groups"][0]["rules"]} == alerts().keys()


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name
        assert rule["annotations"]["summary"].endswith("."), name
        assert rule["for"], name


def test_the_dashboard_is_a_config_map_that_grafana_finds() -> None:
    found = chart.find(chart.render(chart.case("everything")), "ConfigMap", "-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    dashboard = json.loads(found["data"]["kvpull.json"])
    assert dashboard == json.loads((CHART / "files" / "dashboard.json").read_text())
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(places) == len(set(places)) == len({p["id"] for p in dashboard["panels"]})
    variables = {f"${variable['name']}" for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\w+", " ".join(t["expr"] for p in dashboard["panels"] for t in p["targets"])))
    assert used <= variables
