"""Make `values.schema.json` and `README.md` of the chart from its `values.yaml`, the one place where a value
is described: `python -m deploy.helm.describe`.

The comment above a key is its description; what follows ` @ ` in it is JSON schema, as YAML. Without that
the schema follows from the default. `@ FLAGS` stands for the flags of the picker, `@ SIDECAR_FLAGS` for
those of the sidecar, as their own parsers know them. A key that is not described there is refused by helm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.helm import flag_schemas

CHART = Path(__file__).parent / "kvpull"
_MARK = " @ "
_DRAFT = "http://json-schema.org/draft-07/schema#"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_HEAD = """\
# Chart kvpull

Made from `values.yaml` by `python -m deploy.helm.describe`; do not edit. How to install: `docs/install.md`.
What the values of llm-d-router's charts are called here: `docs/migration.md`. Who may do what:
`docs/security.md`.

The one value without which nothing is rendered is `router.modelServers.matchLabels`. A name that is not in
this table is refused.

| value | default | |
|---|---|---|
"""


class DescribeError(ValueError):
    """values.yaml does not say enough; the message names the key."""


@dataclass(frozen=True, slots=True)
class Value:
    """One key: its default as written, and what the comment above it says."""

    path: tuple[str, ...]
    default: Any
    text: str
    schema: dict[str, Any] | None  # None: follows from the default
    children: tuple[Value, ...] = ()

    @property
    def is_group(self) -> bool:
        """Described key by key."""
        return bool(self.children)


def read_values(text: str) -> tuple[Value, ...]:
    """The described keys of a values.yaml.

    Raises:
        DescribeError: a key whose schema cannot be told.
    """
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    return _children(node, (), text.splitlines())


def _children(node: Any, path: tuple[str, ...], lines: list[str]) -> tuple[Value, ...]:
    return tuple(_value(key, value, (*path, key.value), lines) for key, value in node.value)


def _value(key: Any, node: Any, path: tuple[str, ...], lines: list[str]) -> Value:
    words, fragment = _comment(lines, key.start_mark.line, key.start_mark.column)
    schema = _fragment(fragment, ".".join(path))
    default = yaml.SafeLoader("").construct_document(node)
    if isinstance(default, dict) and schema is None:
        if not default:
            raise DescribeError(f"{'.'.join(path)}: an empty map needs `@ {{...}}`: what may be in it?")
        return Value(path, default, words, None, _children(node, path, lines))
    return Value(path, default, words, schema)


def _comment(lines: list[str], line: int, column: int) -> tuple[str, str]:
    """The words and the schema in the comment directly above a key."""
    found: list[str] = []
    while line > 0 and lines[line - 1].startswith(" " * column + "#"):
        line -= 1
        found.insert(0, lines[line].strip().removeprefix("#").strip())
    words, _, fragment = (" " + " ".join(found)).partition(_MARK)
    return words.strip(), fragment.strip()


def _fragment(text: str, where: str) -> dict[str, Any] | None:
    if not text:
        return None
    if text in flag_schemas.SCHEMAS:
        return flag_schemas.SCHEMAS[text]()
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise DescribeError(f"{where}: {text!r} is not a schema")
    return found


def schema_of(values: tuple[Value, ...]) -> dict[str, Any]:
    """JSON schema of an object with these keys and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {value.path[-1]: _schema(value) for value in values},
    }


def _schema(value: Value) -> dict[str, Any]:
    schema = schema_of(value.children) if value.is_group else dict(value.schema or {})
    if not schema.keys() & {"type", "enum", "const"}:
        schema = {"type": _TYPES[type(value.default)], **schema}
    return {"description": value.text, **schema} if value.text else schema


def schema_text(values: tuple[Value, ...]) -> str:
    """Content of values.schema.json."""
    return json.dumps({"$schema": _DRAFT, **schema_of(values)}, indent=1) + "\n"


def readme_text(values: tuple[Value, ...]) -> str:
    """Content of README.md."""
    return _HEAD + "".join(f"{row}\n" for value in values for row in _rows(value))


def _rows(value: Value) -> Iterator[str]:
    name = ".".join(value.path)
    if not value.is_group:
        default = json.dumps(value.default)
        yield f"| `{name}` | `{_cell(default)}` | {_cell(value.text + _choices(value.schema or {}))} |"
        return
    if value.text:
        yield f"| **{name}** | | {_cell(value.text)} |"
    for child in value.children:
        yield from _rows(child)


def _choices(schema: dict[str, Any]) -> str:
    names = [str(name) or '""' for name in schema.get("enum", [])]
    return f" One of {', '.join(names)}." if len(names) > 1 else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").strip()


def main() -> None:
    """Write both files, or with --check say whether they are fresh (exit status 1: they are not)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    values = read_values((CHART / "values.yaml").read_text())
    wanted = {"values.schema.json": schema_text(values), "README.md": readme_text(values)}
    stale = [name for name, text in wanted.items() if not _is(CHART / name, text)]
    if check and stale:
        raise SystemExit(f"{', '.join(stale)}: not fresh; run python -m deploy.helm.describe")
    for name in stale:
        (CHART / name).write_text(wanted[name])


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()
