"""The kinds that the double serves from the start; CRDs add theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Kind:
    """One resource type."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    has_status: bool = False
    schema: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.group, self.version, self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As error messages name it: `pods`, `leases.coordination.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_RBAC = "rbac.authorization.k8s.io"
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", False, ("ns",), True)
PODS = Kind("", "v1", "pods", "Pod", True, ("po",), True)
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount", True, ("sa",))
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap", True, ("cm",))
EVENTS = Kind("", "v1", "events", "Event", True, ("ev",))
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")
ROLES = Kind(_RBAC, "v1", "roles", "Role")
ROLE_BINDINGS = Kind(_RBAC, "v1", "rolebindings", "RoleBinding")
CLUSTER_ROLES = Kind(_RBAC, "v1", "clusterroles", "ClusterRole", False)
CLUSTER_ROLE_BINDINGS = Kind(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", False)
CRDS = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    False,
    ("crd",),
    True,
)

BUILTIN = (
    NAMESPACES,
    PODS,
    CONFIG_MAPS,
    EVENTS,
    LEASES,
    ROLES,
    ROLE_BINDINGS,
    CLUSTER_ROLES,
    CLUSTER_ROLE_BINDINGS,
    CRDS,
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "services", "Service", True, ("svc",), True),
    SERVICE_ACCOUNTS,
    Kind("apps", "v1", "deployments", "Deployment", True, ("deploy",), True),
    Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
    Kind("batch", "v1", "jobs", "Job", has_status=True),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True, ("pdb",), True),
    Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", True, ("hpa",), True),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", True, ("netpol",)),
)
# what controllers put into every namespace
OF_EVERY_NAMESPACE = {SERVICE_ACCOUNTS.key: "default", CONFIG_MAPS.key: "kube-root-ca.crt"}
INFERENCE_POOLS = ("inference.networking.k8s.io", "v1", "inferencepools")
INFERENCE_OBJECTIVES = ("llm-d.ai", "v1alpha2", "inferenceobjectives")
INFERENCE_MODEL_REWRITES = ("llm-d.ai", "v1alpha2", "inferencemodelrewrites")


def kinds_of_crd(crd: dict[str, Any]) -> list[Kind]:
    """What a CustomResourceDefinition makes the server serve."""
    spec, names = crd["spec"], crd["spec"]["names"]
    return [
        Kind(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            spec["scope"] == "Namespaced",
            tuple(names.get("shortNames", ())),
            "status" in (version.get("subresources") or {}),
            (version.get("schema") or {}).get("openAPIV3Schema"),
        )
        for version in spec["versions"]
        if version.get("served")
    ]
