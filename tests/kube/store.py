"""The objects: one revision, and of every kind a table with a bounded log of its changes.

Stored objects are never changed in place, so a watcher may hold one.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.kube import kinds, schema
from tests.kube.kinds import Kind
from tests.kube.status import ApiFault, not_found

Key = tuple[str, str]  # namespace, name
_KEPT = (
    "uid",
    "creationTimestamp",
    "generation",
    "namespace",
    "name",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)


class Change(NamedTuple):
    """One write."""

    revision: int
    type: str  # ADDED, MODIFIED, DELETED
    new: dict[str, Any]
    old: dict[str, Any] | None


class Table:
    """All objects of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.objects: dict[Key, dict[str, Any]] = {}
        self.log: deque[Change] = deque()
        self.floor = 0  # revision of the last change that the log has lost
        self.watchers: set[asyncio.Event] = set()

    def announce(self) -> None:
        """Wake every watcher."""
        for watcher in self.watchers:
            watcher.set()

    def compact(self) -> None:
        """Lose the log: every watch from an older revision gets 410."""
        if self.log:
            self.floor = self.log[-1].revision
            self.log.clear()


class Store:
    """Reads and writes of objects. `time` makes timestamps."""

    def __init__(
        self, *, log_size: int = 1000, time: Callable[[], str] = lambda: "2026-01-01T00:00:00Z"
    ) -> None:
        self.revision = 1
        self._log_size = log_size
        self._time = time
        self.tables: dict[tuple[str, str, str], Table] = {kind.key: Table(kind) for kind in kinds.BUILTIN}
        for name in ("default", "kube-system"):
            self.create(kinds.NAMESPACES.key, "", {"metadata": {"name": name}, "status": {"phase": "Active"}})

    def forget(self) -> None:
        """Of every kind, what happened so far: a watch from before now gets 410."""
        for table in self.tables.values():
            table.log.clear()
            table.floor = self.revision

    def table(self, key: tuple[str, str, str]) -> Table:
        """Raises ApiFault 404 for a kind that is not served."""
        if key not in self.tables:
            raise not_found()
        return self.tables[key]

    def get(self, key: tuple[str, str, str], namespace: str, name: str) -> dict[str, Any]:
        table = self.table(key)
        found = table.objects.get((namespace if table.kind.namespaced else "", name))
        if found is None:
            details = {"name": name, "group": table.kind.group, "kind": table.kind.plural}
            raise ApiFault(404, "NotFound", f'{table.kind.qualified} "{name}" not found', details=details)
        return found

    def create(
        self, key: tuple[str, str, str], namespace: str, body: dict[str, Any], *, dry: bool = False
    ) -> dict[str, Any]:
        table = self.table(key)
        kind = table.kind
        obj: dict[str, Any] = {"apiVersion": kind.api_version, "kind": kind.kind} | schema.prune(
            kind.schema, copy.deepcopy(body)
        )
        meta = obj["metadata"] = copy.deepcopy(body.get("metadata") or {})
        if kind.namespaced:
            if meta.setdefault("namespace", namespace) != namespace:
                raise ApiFault(400, "BadRequest", "the namespace of the object is not that of the request")
            self.get(kinds.NAMESPACES.key, "", namespace)
        if not meta.get("name"):
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        where = (namespace if kind.namespaced else "", meta["name"])
        if where in table.objects:
            details = {"name": meta["name"], "kind": kind.plural}
            raise ApiFault(
                409, "AlreadyExists", f'{kind.qualified} "{meta["name"]}" already exists', details=details
            )
        meta |= {"uid": str(uuid.uuid4()), "generation": 1}
        meta.setdefault("creationTimestamp", self._time())
        if meta["creationTimestamp"] is None:
            meta["creationTimestamp"] = self._time()
        schema.check(kind, obj)
        if kind.key == kinds.CRDS.key:
            _approved(obj)
            obj["status"] = _established(obj)
        stored = obj if dry else self._put(table, where, obj, "ADDED")
        if kind.key == kinds.NAMESPACES.key and not dry:
            self._settle(meta["name"])
        return stored

    def _settle(self, namespace: str) -> None:
        """What controllers put into every namespace."""
        for key, name in kinds.OF_EVERY_NAMESPACE.items():
            self.create(key, namespace, {"metadata": {"name": name}})

    def update(
        self,
        key: tuple[str, str, str],
        namespace: str,
        name: str,
        body: dict[str, Any],
        *,
        status_only: bool = False,
        dry: bool = False,
    ) -> dict[str, Any]:
        table = self.table(key)
        kind, old = table.kind, self.get(key, namespace, name)
        new = schema.prune(kind.schema, copy.deepcopy(body)) | {"metadata": copy.deepcopy(body["metadata"])}
        asked = new["metadata"].get("resourceVersion")
        if asked and asked != old["metadata"]["resourceVersion"]:
            raise ApiFault(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {kind.qualified} "{name}": the object has been modified; '
                "please apply your changes to the latest version and try again",
            )
        if status_only:
            new = copy.deepcopy(old) | {"status": new.get("status")}
        elif kind.has_status:
            new.pop("status", None)
            new |= {"status": old["status"]} if "status" in old else {}
        kept = {field: old["metadata"][field] for field in _KEPT if field in old["metadata"]}
        new["metadata"] |= kept | {"resourceVersion": old["metadata"]["resourceVersion"]}
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        schema.check(kind, new)
        if dry or new == old:  # a write that changes nothing is no new revision
            return new
        gone = "deletionTimestamp" in new["metadata"] and not _waits(kind, new)
        where = (namespace if kind.namespaced else "", name)
        return self._put(table, where, new, "DELETED" if gone else "MODIFIED")

    def delete(
        self,
        key: tuple[str, str, str],
        namespace: str,
        name: str,
        *,
        now: bool = False,
        uid: str = "",
        dry: bool = False,
    ) -> dict[str, Any]:
        """Gone, or marked where a finalizer or a kubelet has to end it. `now`: no grace period."""
        table = self.table(key)
        old = self.get(key, namespace, name)
        if uid and uid != old["metadata"]["uid"]:
            raise ApiFault(409, "Conflict", "the UID in the precondition is not that of the object")
        if dry:
            return old
        if key == kinds.NAMESPACES.key:
            self._empty(name)
        where = (namespace if table.kind.namespaced else "", name)
        if not _waits(table.kind, old) or (now and not old["metadata"].get("finalizers")):
            return self._put(table, where, old, "DELETED")
        if "deletionTimestamp" in old["metadata"]:
            return old
        new = copy.deepcopy(old)
        new["metadata"] |= {"deletionTimestamp": self._time(), "deletionGracePeriodSeconds": 30}
        return self._put(table, where, new, "MODIFIED")

    def _empty(self, namespace: str) -> None:
        """What a namespace holds goes with it, at once and whatever waits for whom."""
        for table in list(self.tables.values()):
            for where in [where for where in table.objects if where[0] == namespace and where[0]]:
                self._put(table, where, table.objects[where], "DELETED")

    def _put(self, table: Table, where: Key, obj: dict[str, Any], change: str) -> dict[str, Any]:
        self.revision += 1
        stored = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.revision)}}
        old = table.objects.get(where)
        if change == "DELETED":
            del table.objects[where]
        else:
            table.objects[where] = stored
        table.log.append(Change(self.revision, change, stored, old))
        while len(table.log) > self._log_size:
            table.floor = table.log.popleft().revision
        table.announce()
        if table.kind.key == kinds.CRDS.key:
            self._serve_crd(stored, gone=change == "DELETED")
        return stored

    def _serve_crd(self, crd: dict[str, Any], *, gone: bool) -> None:
        for kind in kinds.kinds_of_crd(crd):
            if gone:
                self.tables.pop(kind.key, None)
            elif kind.key in self.tables:
                self.tables[kind.key].kind = kind
            else:
                self.tables[kind.key] = Table(kind)


def _waits(kind: Kind, obj: dict[str, Any]) -> bool:
    """Whether a deletion has to be ended by somebody else: a finalizer, or the kubelet of a bound pod."""
    return bool(obj["metadata"].get("finalizers")) or (
        kind.key == kinds.PODS.key and bool((obj.get("spec") or {}).get("nodeName"))
    )


def _approved(crd: dict[str, Any]) -> None:
    """Groups of the Kubernetes project are protected."""
    group, annotations = crd["spec"]["group"], crd["metadata"].get("annotations") or {}
    if group.endswith((".k8s.io", ".kubernetes.io")) and "api-approved.kubernetes.io" not in annotations:
        told = "protected groups must have approval annotation "
        raise ApiFault(422, "Invalid", f'{told}"api-approved.kubernetes.io"')


def _established(crd: dict[str, Any]) -> dict[str, Any]:
    conditions = [
        {"type": kind, "status": "True", "reason": "NoConflicts", "message": "", "lastTransitionTime": None}
        for kind in ("NamesAccepted", "Established")
    ]
    return {"acceptedNames": crd["spec"]["names"], "conditions": conditions, "storedVersions": []}
