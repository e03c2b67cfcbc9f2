"""Structural schemas of CRDs: what an API server checks of a custom resource, without CEL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.kube.kinds import Kind
from tests.kube.status import ApiFault

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def check(kind: Kind, obj: dict[str, Any]) -> None:
    """Raises ApiFault 422 with a cause for every field that is wrong."""
    if kind.schema is None:
        return
    body = {key: value for key, value in obj.items() if key != "metadata"}
    causes = [
        {"reason": "FieldValueInvalid", "field": path, "message": message}
        for path, message in _errors(kind.schema, body, "")
    ]
    if causes:
        name = obj["metadata"].get("name")
        sentence = "; ".join(f"{cause['field']}: {cause['message']}" for cause in causes)
        details = {"group": kind.group, "kind": kind.kind, "name": name, "causes": causes}
        raise ApiFault(
            422, "Invalid", f'{kind.kind}.{kind.group} "{name}" is invalid: {sentence}', details=details
        )


def prune(schema: dict[str, Any] | None, value: Any) -> Any:
    """Without the fields that the schema does not know: a server drops them."""
    if schema is None or schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, list):
        return [prune(schema.get("items"), item) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    known = schema["properties"]
    return {key: prune(known[key], item) for key, item in value.items() if key in known}


def _errors(schema: dict[str, Any], value: Any, path: str) -> Iterator[tuple[str, str]]:
    expected = schema.get("type")
    if expected and not _is(expected, value):
        yield path, f"must be of type {expected}: {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield path, f"Unsupported value: {value!r}: supported values: {', '.join(map(repr, schema['enum']))}"
    if isinstance(value, dict):
        yield from _of_object(schema, value, path)
    elif isinstance(value, list):
        yield from _of_list(schema, value, path)
    elif isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield path, f"should match {schema['pattern']!r}"
        if len(value) > schema.get("maxLength", len(value)) or len(value) < schema.get("minLength", 0):
            yield path, "has a wrong length"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        if not low <= value <= high:
            yield path, f"{value} is not between {low} and {high}"


def _is(expected: str, value: Any) -> bool:
    return isinstance(value, _TYPES[expected]) and (expected == "boolean" or not isinstance(value, bool))


def _of_object(schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}".lstrip("."), "Required value"
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    for name, item in value.items():
        below = properties.get(name) or (more if isinstance(more, dict) else None)
        if below is not None:
            yield from _errors(below, item, f"{path}.{name}".lstrip("."))


def _of_list(schema: dict[str, Any], value: list[Any], path: str) -> Iterator[tuple[str, str]]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield (
            path,
            f"must have {schema.get('minItems', 0)} to {schema.get('maxItems')} items, has {len(value)}",
        )
    for number, item in enumerate(value):
        yield from _errors(schema.get("items", {}), item, f"{path}[{number}]")
