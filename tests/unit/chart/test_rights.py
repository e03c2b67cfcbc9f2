"""RBAC: what docs/kubernetes.md says and the picker uses, no more."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.kube import chart
from tests.kube.chart import CASES, CHART, Manifest

PAGE = (CHART.parents[2] / "docs" / "kubernetes.md").read_text()


def rules(role: Manifest) -> list[tuple[Any, ...]]:
    return sorted(
        (tuple(r["apiGroups"]), tuple(r["resources"]), tuple(r["verbs"]), tuple(r.get("resourceNames", ())))
        for r in role["rules"]
    )


def test_the_role_is_the_one_of_the_page() -> None:
    page = next(yaml.safe_load_all(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]))
    ours = chart.find(chart.minimal({"thresholds": {"name": "pulls"}}), "Role")
    assert rules(ours) == rules(page)


def test_several_pickers_may_use_leases_and_one_may_not() -> None:
    page = next(yaml.safe_load_all(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]))
    several = chart.minimal({"thresholds": {"name": "pulls"}, "router": {"epp": {"replicas": 2}}})
    alone = chart.minimal({"thresholds": {"name": "pulls"}})
    more = set(rules(chart.find(several, "Role"))) - set(rules(chart.find(alone, "Role")))
    assert more == set(rules(page))
    leases = [r for r in chart.find(chart.render(chart.case("standby")), "Role", "-epp")["rules"]]
    by_name = {tuple(r.get("resourceNames", ())): r["verbs"] for r in leases if r["resources"] == ["leases"]}
    assert by_name == {(): ["create"], ("kv-epp",): ["get", "update"]}  # the one Lease that they share


def test_without_objectives_they_are_not_read() -> None:
    manifests = chart.render(chart.case("standby"))
    assert "inferenceobjectives" not in str(chart.find(manifests, "Role", "-epp")["rules"])
    assert "--objectives-group=" in chart.container(manifests, "epp")["args"]


def test_only_watched_config_maps_can_be_read() -> None:
    manifests = chart.render(chart.case("attach"))
    arguments = chart.container(manifests, "epp")["args"]
    watched = {a.partition("=")[2] for a in arguments if a.startswith("--thresholds-configmap=")}
    rule = next(r for r in chart.find(manifests, "Role")["rules"] if r["resources"] == ["configmaps"])
    assert set(rule["resourceNames"]) == watched == {"kv-epp-thresholds", "pulls-of-my-team"}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_granted_cluster_wide_or_by_wildcard(case: str) -> None:
    manifests = chart.render(chart.case(case))
    assert not chart.kinds(manifests) & {"ClusterRole", "ClusterRoleBinding"}
    for role in (m for m in manifests if m["kind"] == "Role"):
        assert "*" not in str(role["rules"])
        assert "secrets" not in str(role["rules"])


@pytest.mark.parametrize("case", CASES)
def test_bindings_name_roles_and_accounts_that_pods_use(case: str) -> None:
    manifests = chart.render(chart.case(case))
    accounts = {m["metadata"]["name"] for m in manifests if m["kind"] == "ServiceAccount"}
    roles = {m["metadata"]["name"] for m in manifests if m["kind"] == "Role"}
    used = {spec["serviceAccountName"] for _, spec in chart.pods(manifests) if "serviceAccountName" in spec}
    for binding in (m for m in manifests if m["kind"] == "RoleBinding"):
        assert binding["roleRef"]["name"] in roles
        assert {subject["name"] for subject in binding["subjects"]} <= accounts & used


@pytest.mark.parametrize("case", CASES)
def test_only_pods_that_ask_the_api_server_have_a_token(case: str) -> None:
    for name, spec in chart.pods(chart.render(chart.case(case))):
        asks = "serviceAccountName" in spec
        assert spec["automountServiceAccountToken"] is asks, name


def test_without_a_pool_pools_are_not_read() -> None:
    assert "inferencepools" not in str(chart.find(chart.render(chart.case("standalone")), "Role", "-epp"))


def test_an_account_and_a_role_of_ones_own() -> None:
    own = {"serviceAccount": {"create": False, "name": "mine"}, "rbac": {"create": False}}
    manifests = chart.minimal({"router": {"epp": own}})
    assert not chart.kinds(manifests) & {"ServiceAccount", "Role", "RoleBinding"}
    spec = chart.find(manifests, "Deployment")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "mine"
