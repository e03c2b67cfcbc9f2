"""Texts on which a YAML loader must fail in one way only."""

from __future__ import annotations

from typing import Final

HOSTILE: Final[dict[str, str]] = {
    "month 13": "spec: 2026-13-45",
    "5,000 digits": "spec: " + "1" * 5000,
    "sexagesimal": "spec: 1" + ":59" * 20_000,
    "float of a text": "spec: !!float x",
    "bool of a text": "spec: !!bool foo",
    "timestamp of a text": "spec: !!timestamp foo",
    "int of nothing": 'spec: !!int ""',
    "binary digits of nothing": "spec: 0b_",
    "an object": "spec: !!python/object:os.system {}",
    "open brackets": "[" * 3000,
    "nested brackets": "[" * 30_000 + "]" * 30_000,
    "nested blocks": "- " * 3000,
    "key twice": "spec: {enabled: true, enabled: false}",
    "key twice, quoted": "spec: {enabled: true, 'enabled': false}",
    "cycle": "&a {spec: *a}",
    "alias of nothing": "spec: *a",
    "NUL": "a: \x00",
    "lone surrogate": 'a: "\ud800"',
    "two documents": "a: 1\n---\nb: 2",
    "list as key": "{[a]: 1}",
    "merge of a text": "{<<: a}",
    "laughs": "a0: &a0 [x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
}
