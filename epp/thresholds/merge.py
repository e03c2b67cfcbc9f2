"""Several PullThresholds documents as one: the written merge rule (docs/pulls.md).

Documents are taken in the order of their names. A setting is a key: scope + field. Where two documents
set the same key, the one with the later name wins and the merge says so in a warning. Different scopes
never conflict: which of them applies to a request is the specificity rule of `epp.core.thresholds`.
Every input (mounted directory, API watch) goes through here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from epp.core.errors import ConfigError
from epp.core.thresholds import NO_SETTINGS, SETTING_NAMES, PullSettings, Scope
from epp.thresholds.document import SETTING_PATHS, ThresholdDocument, parse_document

Texts = tuple[tuple[str, str], ...]  # name and text of every document

MAX_SCOPES = 1024  # of all documents together
MAX_WARNINGS = 16


@dataclass(frozen=True, slots=True)
class Merged:
    """All documents together."""

    rules: dict[Scope, PullSettings]
    warnings: tuple[str, ...] = ()


def merge_texts(texts: Texts) -> Merged:
    """Parse and merge; one bad document refuses them all, so that no half of a change is in force.

    Raises:
        ConfigError: names the document and the path inside it.
    """
    return merge(parse_document(text, name) for name, text in texts)


def merge(documents: Iterable[ThresholdDocument]) -> Merged:
    """Raises ConfigError for more scopes than anybody can oversee."""
    rules: dict[Scope, PullSettings] = {}
    set_by: dict[tuple[Scope, str], str] = {}
    warnings: list[str] = []
    for document in sorted(documents, key=lambda d: d.name):
        for scope, settings in document.rules.items():
            merged = rules.get(scope, NO_SETTINGS)
            for name in SETTING_NAMES:
                value = getattr(settings, name)
                if value is None:
                    continue
                earlier = set_by.get((scope, name))
                if earlier is not None:
                    path = f"{document.paths[scope]}.{SETTING_PATHS[name]}"
                    warnings.append(
                        f"{document.name}: {path}: {value} replaces {getattr(merged, name)} of {earlier}"
                    )
                set_by[scope, name] = document.name
                merged = replace(merged, **{name: value})
            rules[scope] = merged
    if len(rules) > MAX_SCOPES:
        raise ConfigError(f"{len(rules)} scopes in all documents; {MAX_SCOPES} are allowed")
    more = len(warnings) - MAX_WARNINGS
    return Merged(rules, (*warnings[:MAX_WARNINGS], *([f"{more} more"] if more > 0 else ())))
