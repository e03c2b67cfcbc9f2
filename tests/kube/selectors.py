"""Label and field selectors."""

from __future__ import annotations

import re
from typing import Any

_SET = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")
_COMMA_OUTSIDE = re.compile(r",(?![^(]*\))")


def matches(obj: dict[str, Any], labels: str, fields: str) -> bool:
    """Whether an object is selected; empty selectors select everything."""
    return match_labels(labels, obj["metadata"].get("labels") or {}) and _match_fields(fields, obj)


def match_labels(selector: str, labels: dict[str, str]) -> bool:
    """Equality, set and existence terms, all of which must hold."""
    return all(_term(term.strip(), labels) for term in _COMMA_OUTSIDE.split(selector) if term.strip())


def _term(term: str, labels: dict[str, str]) -> bool:
    if found := _SET.fullmatch(term):
        values = {value.strip() for value in found[3].split(",")}
        return (labels.get(found[1]) in values) == (found[2] == "in")
    if "!=" in term:
        key, value = term.split("!=", 1)
        return labels.get(key.strip()) != value.strip()
    if "=" in term:
        key, value = re.split("==?", term, maxsplit=1)
        return labels.get(key.strip()) == value.strip()
    return term[1:] not in labels if term.startswith("!") else term in labels


def _match_fields(selector: str, obj: dict[str, Any]) -> bool:
    for term in filter(None, selector.split(",")):
        path, value = re.split("!=|==|=", term, maxsplit=1)
        if (_field(obj, path) == value) == ("!=" in term):
            return False
    return True


def _field(obj: Any, path: str) -> str:
    for part in path.split("."):
        obj = obj.get(part) if isinstance(obj, dict) else None
    return "" if obj is None else str(obj)
