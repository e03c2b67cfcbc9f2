"""What kubectl asks before it does anything: groups, resources, and a sketch of OpenAPI."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.kube.kinds import VERBS, Kind
from tests.kube.status import not_found
from tests.kube.store import Store

AGGREGATED = "as=APIGroupDiscoveryList"


class Discovery:
    """Documents about the kinds that the store serves now."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def document(self, parts: list[str], *, aggregated: bool) -> dict[str, Any]:
        """The document at a path of /api, /apis, /openapi or /version."""
        match parts:
            case ["version"]:
                return {"major": "1", "minor": "37", "gitVersion": "v1.37.1", "platform": "linux/amd64"}
            case ["api"] if aggregated:
                return self._aggregated([""])
            case ["apis"] if aggregated:
                return self._aggregated([group for group in self._groups() if group])
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
            case ["apis"]:
                groups = [_group(g, v) for g, v in self._groups().items() if g]
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
            case ["api", version]:
                return self._resources("", version)
            case ["apis", group] if group in self._groups():
                return {"kind": "APIGroup", "apiVersion": "v1"} | _group(group, self._groups()[group])
            case ["apis", group, version]:
                return self._resources(group, version)
            case ["openapi", "v3"]:
                return {
                    "paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in self._paths()}
                }
            case ["openapi", "v3", *path]:
                return self._openapi("/".join(path))
        raise not_found()

    def _kinds(self) -> list[Kind]:
        return [table.kind for table in self._store.tables.values()]

    def _groups(self) -> dict[str, list[str]]:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for kind in self._kinds():
            found[kind.group].add(kind.version)
        return {group: sorted(versions) for group, versions in sorted(found.items())}

    def _resources(self, group: str, version: str) -> dict[str, Any]:
        resources = []
        for kind in self._kinds():
            if (kind.group, kind.version) == (group, version):
                resources += _entries(kind)
        if not resources:
            raise not_found()
        name = f"{group}/{version}" if group else version
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}

    def _aggregated(self, groups: list[str]) -> dict[str, Any]:
        items = []
        for group in groups:
            versions = [
                {"version": version, "freshness": "Current", "resources": self._aggregated_of(group, version)}
                for version in self._groups()[group]
            ]
            items.append({"metadata": {"name": group, "creationTimestamp": None}, "versions": versions})
        return {
            "kind": "APIGroupDiscoveryList",
            "apiVersion": "apidiscovery.k8s.io/v2",
            "metadata": {},
            "items": items,
        }

    def _aggregated_of(self, group: str, version: str) -> list[dict[str, Any]]:
        return [
            {
                "resource": kind.plural,
                "responseKind": {"group": group, "version": version, "kind": kind.kind},
                "scope": "Namespaced" if kind.namespaced else "Cluster",
                "singularResource": kind.kind.lower(),
                "verbs": VERBS,
                "shortNames": list(kind.short),
            }
            for kind in self._kinds()
            if (kind.group, kind.version) == (group, version)
        ]

    def _paths(self) -> list[str]:
        return sorted({_path(kind) for kind in self._kinds()})

    def _openapi(self, path: str) -> dict[str, Any]:
        """Enough for kubectl to see that the server checks fields itself."""
        parameters = [
            {"name": name, "in": "query", "schema": {"type": "string"}}
            for name in ("fieldValidation", "dryRun")
        ]
        paths = {}
        for kind in self._kinds():
            if _path(kind) == path:
                gvk = {"group": kind.group, "version": kind.version, "kind": kind.kind}
                operation = {
                    "x-kubernetes-group-version-kind": gvk,
                    "parameters": parameters,
                    "responses": {},
                }
                where = "namespaces/{namespace}/" if kind.namespaced else ""
                paths[f"/{path}/{where}{kind.plural}/{{name}}"] = {"patch": operation}
        if not paths:
            raise not_found()
        return {
            "openapi": "3.0.0",
            "info": {"title": "test", "version": "v1"},
            "paths": paths,
            "components": {"schemas": {}},
        }


def _path(kind: Kind) -> str:
    return f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}"


def _group(group: str, versions: list[str]) -> dict[str, Any]:
    named = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
    return {"name": group, "versions": named, "preferredVersion": named[0]}


def _entries(kind: Kind) -> list[dict[str, Any]]:
    base = {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "namespaced": kind.namespaced,
        "kind": kind.kind,
    }
    entries = [base | {"verbs": VERBS, "shortNames": list(kind.short)}]
    if kind.has_status:
        entries.append(
            base | {"name": f"{kind.plural}/status", "singularName": "", "verbs": ["get", "patch", "update"]}
        )
    return entries
