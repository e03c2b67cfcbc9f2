"""The four kinds of patch. Lists are owned and replaced whole in an apply patch (a real server merges
keyed lists there); in a strategic patch lists of named things are merged by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.kube.kinds import Kind
from tests.kube.status import ApiFault, bad_request

Path = tuple[str, ...]


def merge(old: Any, new: Any, *, strategic: bool = False) -> Any:
    """RFC 7386, or its strategic form."""
    if strategic and isinstance(new, list) and isinstance(old, list) and _all_named(old + new):
        return _merge_named(old, new)
    if not isinstance(new, dict):
        return copy.deepcopy(new)
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if strategic and key.startswith("$"):
            continue  # directives: order of elements
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value, strategic=strategic)
    return merged


def _all_named(items: list[Any]) -> bool:
    return all(isinstance(item, dict) and "name" in item for item in items)


def _merge_named(old: list[Any], new: list[Any]) -> list[Any]:
    merged = {item["name"]: item for item in old}
    for item in new:
        if item.get("$patch") == "delete":
            merged.pop(item["name"], None)
        else:
            merged[item["name"]] = merge(merged.get(item["name"]), item, strategic=True)
    return list(merged.values())


def json_patch(obj: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902: add, remove, replace, test."""
    obj = copy.deepcopy(obj)
    for operation in operations:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        target = obj
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        _apply_one(target, last, operation)
    return obj


def _apply_one(target: Any, last: str, operation: dict[str, Any]) -> None:
    op, key = operation["op"], (last if isinstance(target, dict) or last == "-" else int(last))
    try:
        if op == "test":
            if target[key] != operation["value"]:
                raise ApiFault(422, "Invalid", f"the test operation failed at {operation['path']}")
        elif op == "remove":
            del target[key]
        elif op in ("add", "replace") and isinstance(target, dict):
            target[key] = operation["value"]
        elif op == "add":
            target.insert(len(target) if key == "-" else key, operation["value"])
        elif op == "replace":
            target[key] = operation["value"]
        else:
            raise bad_request(f"operation {op!r} is not supported")
    except (KeyError, IndexError) as error:
        raise ApiFault(422, "Invalid", f"nothing at {operation['path']}") from error


# --- apply -----------------------------------------------------------------------------------------


def apply(
    kind: Kind, old: dict[str, Any], body: dict[str, Any], manager: str, *, force: bool
) -> dict[str, Any]:
    """Server-side apply by leaf ownership. Raises ApiFault 409 for a conflict."""
    mine, others = _owners(old, manager)
    want = set(_leaves(_content(body)))
    conflicts = sorted(path for path in want & others.keys() if _at(body, path) != _at(old, path))
    if conflicts and not force:
        sentence = ", ".join(f'conflict with "{others[path]}": .{".".join(path)}' for path in conflicts)
        raise ApiFault(409, "Conflict", f"Apply failed with {len(conflicts)} conflict(s): {sentence}")
    new = merge(old, body)
    for path in mine - want - others.keys():  # what I stop applying and nobody else owns
        holder = _at(new, path[:-1])
        if isinstance(holder, dict):
            holder.pop(path[-1], None)
    return own(kind, new, body, manager)


def own(kind: Kind, obj: dict[str, Any], applied: dict[str, Any], manager: str) -> dict[str, Any]:
    """`obj` with `manager` as the owner of what it applied."""
    obj = copy.deepcopy(obj)
    fields: dict[str, Any] = {}
    for path in _leaves(_content(applied)):
        below = fields
        for part in path:
            below = below.setdefault(f"f:{part}", {})
    entry = {"manager": manager, "operation": "Apply", "apiVersion": kind.api_version}
    kept = [e for e in obj["metadata"].get("managedFields", []) if e["manager"] != manager]
    entry |= {"fieldsType": "FieldsV1", "fieldsV1": fields}
    obj["metadata"]["managedFields"] = [*kept, entry]
    return obj


def _content(body: dict[str, Any]) -> dict[str, Any]:
    content = {key: value for key, value in body.items() if key not in ("apiVersion", "kind", "status")}
    identity = ("name", "namespace", "managedFields", "creationTimestamp", "uid", "resourceVersion")
    content["metadata"] = {k: v for k, v in (body.get("metadata") or {}).items() if k not in identity}
    return content


def _leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path


def _owners(obj: dict[str, Any], manager: str) -> tuple[set[Path], dict[Path, str]]:
    mine: set[Path] = set()
    others: dict[Path, str] = {}
    for entry in obj["metadata"].get("managedFields", []):
        for path in _owned(entry["fieldsV1"]):
            if entry["manager"] == manager:
                mine.add(path)
            else:
                others[path] = entry["manager"]
    return mine, others


def _owned(fields: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    if not fields:
        yield path
    for key, below in fields.items():
        yield from _owned(below, (*path, key.removeprefix("f:")))


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value
