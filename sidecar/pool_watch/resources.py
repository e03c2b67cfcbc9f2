"""The kinds of objects we read or write, their paths, and what a caller wants of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

POOL_GROUP: Final = "inference.networking.k8s.io"

_METHODS: Final = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind, by its plural."""

    group: str
    version: str
    plural: str

    @property
    def qualified(self) -> str:
        """As RBAC messages write it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """URL path of the collection, or of one object."""
        parts = ["/apis", self.group] if self.group else ["/api"]
        parts += [self.version, "namespaces", namespace, self.plural]
        return "/".join([*parts, name] if name else parts)


PODS: Final = Resource("", "v1", "pods")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps")
EVENTS: Final = Resource("", "v1", "events")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases")


def inference_pools(group: str = POOL_GROUP) -> Resource:
    """InferencePool v1; another group serves the same kind where a distribution renames it."""
    return Resource(group, "v1", "inferencepools")


@dataclass(frozen=True, slots=True)
class Selection:
    """Objects of one kind in one namespace, all of them or those a selector names."""

    resource: Resource
    namespace: str
    labels: str = ""
    fields: str = ""

    @classmethod
    def named(cls, resource: Resource, namespace: str, name: str) -> Selection:
        """One object. A Role with `resourceNames` allows list and watch in exactly this form."""
        return cls(resource, namespace, fields=f"metadata.name={name}")

    def query(self) -> dict[str, str]:
        pairs = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {key: value for key, value in pairs.items() if value}

    def __str__(self) -> str:
        chosen = self.labels or self.fields
        return f"{self.resource.qualified} in {self.namespace}" + (f" ({chosen})" if chosen else "")


@dataclass(frozen=True, slots=True)
class Call:
    """One request: what RBAC calls it, and what HTTP needs."""

    verb: str
    resource: Resource
    namespace: str
    name: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None

    @property
    def method(self) -> str:
        return _METHODS[self.verb]

    @property
    def path(self) -> str:
        return self.resource.path(self.namespace, self.name)
