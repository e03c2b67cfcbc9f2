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
    (page,) = service["spec"]["endpoints"]
    assert (page["port"], page["path"], page["interval"]) == ("http-metrics", "/metrics", "10s")
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


def test_metrics_behind_tls_are_asked_for_by_tls() -> None:
    """By everybody: monitors, the kubelet and the doctor. Without the values nothing of it is rendered."""
    manifests = chart.render(chart.case("everything"))
    tls = {
        "scheme": "https",
        "tlsConfig": {"serverName": "kv-epp", "ca": {"secret": {"name": "picker-ca", "key": "ca.crt"}}},
    }
    (page,) = chart.find(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert page.items() >= tls.items()
    engine, sidecar = chart.find(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (sidecar.items() >= tls.items(), "scheme" in engine) == (True, False)
    assert chart.container(manifests, "sidecar")["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert {
        "picker": asked_for(manifests, "epp", "picker-metrics", "monitors"),
        "sidecar": asked_for(manifests, "sidecar", "sidecar-metrics"),
        "doctor": asked_for(manifests, "doctor", "doctor-tls"),
    } == {
        "picker": {
            "--metrics-cert-dir=/etc/kvpull/metrics-tls",
            "--metrics-client-ca-file=/etc/kvpull/metrics-clients/ca.crt",
        },
        "sidecar": {"--metrics-cert-dir=/etc/kvpull/metrics-tls"},
        "doctor": {
            "--url=https://kv-epp-siblings.llm.svc.cluster.local:9090",
            "--ca-file=/etc/kvpull/tls/ca.crt",
            "--client-cert-dir=/etc/kvpull/tls",
            "--sidecar-metrics-scheme=https",
        },
    }
    plain = str([m for m in chart.render(chart.case("minimal")) if m["kind"] != "ConfigMap"])
    assert not re.search("metrics-cert|metrics-client|https|metrics-tls", plain)


def asked_for(manifests: list[Manifest], container: str, *secrets: str) -> set[str]:
    """Arguments that are about TLS on metrics; each names a file in a volume of one of these Secrets."""
    name, spec = next(
        (name, spec) for name, spec in chart.pods(manifests) if container in str(chart.containers(spec))
    )
    found = chart.container(manifests, container)
    mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
    for secret in secrets:
        (volume,) = (v for v in spec["volumes"] if v.get("secret", {}).get("secretName") == secret)
        path = mounts[volume["name"]]
        assert any(path in argument for argument in found["args"]), (name, path)
    terms = ("metrics-c", "https", "--ca-file", "--client-cert")
    return {a for a in found["args"] if any(term in a for term in terms) and "model-server" not in a}


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
