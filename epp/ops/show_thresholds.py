"""`kvpull thresholds show` and `check`: what is in force in running pickers; is a file good."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from epp.core.errors import ConfigError
from epp.core.thresholds import SETTING_NAMES
from epp.ops.asking import STRANGE, Answer, ask_all
from epp.ops.text import printable
from epp.thresholds.document import MAX_DOCUMENT_BYTES, SETTING_PATHS
from epp.thresholds.merge import Merged, Texts, merge_texts
from sidecar.yaml_text import YamlTextError, read_text

_IN_FORCE = ("minCachedTokenDelta", "requireVerified", "inflightAwareness", "maxInflightPulls", "mode")


def show(arguments: argparse.Namespace) -> int:
    """0: all pickers answer and agree; 1: content was refused, or pickers differ; 3: one did not answer."""
    answers = [_understood(a) for a in ask_all(arguments, "/debug/kvpull/thresholds")]
    if arguments.json:
        print(json.dumps({answer.url: answer.body for answer in answers}, indent=2))
    for answer in answers:
        if not answer.found:
            print(f"kvpull: {answer.url}: {answer.fault or 'has no such page'}", file=sys.stderr)
        elif not arguments.json:
            print("\n".join(map(printable, _lines(answer))))
    if not all(answer.found for answer in answers):
        return 3
    differ = len({json.dumps([a.body["active"], a.body["rules"]], sort_keys=True) for a in answers}) > 1
    if differ:
        print("kvpull: the pickers do not have the same thresholds in force", file=sys.stderr)
    return int(differ or any(answer.body["rejected"] for answer in answers))


def _understood(answer: Answer) -> Answer:
    """The answer, if it is a picker's."""
    if answer.found:
        try:
            list(_lines(answer))
        except STRANGE:
            return Answer(answer.url, fault="its answer is no thresholds page")
    return answer


def _lines(answer: Answer) -> Iterator[str]:
    body = answer.body
    state = "pulls on" if body["active"] else "pulls off"
    yield f"{answer.url}: {state}, generation {body['generation']}, from {body['source']}"
    if not body["configured"]:
        yield "  p2p-source-producer is not configured: nothing below has an effect"
    if body["rejected"]:
        yield f"  NOT IN FORCE, refused: {body['rejected']}"
    for warning in body["warnings"]:
        yield f"  warning: {warning}"
    yield f"  documents: {', '.join(body['documents']) or 'none'}"
    yield "  for all requests: " + ", ".join(f"{name} {body[name]}" for name in _IN_FORCE)
    for rule in body["rules"]:
        yield f"  {_scope(rule)}: " + ", ".join(f"{name} {value}" for name, value in rule["set"].items())


def _scope(rule: Mapping[str, Any]) -> str:
    names = {"model": "model", "role": "role", "source_class": "sourceClass"}
    parts = [f"{said}={rule[name]}" for name, said in names.items() if rule[name] is not None]
    return " ".join(parts) or "default"


def read_files(files: Sequence[Path]) -> Texts:
    """Names and texts. Raises ConfigError."""
    texts = []
    for path in files:
        try:
            texts.append((path.name, read_text(path, max_bytes=MAX_DOCUMENT_BYTES)))
        except (OSError, YamlTextError) as error:
            raise ConfigError(f"{path}: {error}") from error
    return tuple(texts)


def check(arguments: argparse.Namespace) -> int:
    """0: good; ConfigError (2) names the document and the path inside it."""
    print("\n".join(_merged_lines(merge_texts(read_files(arguments.files)))))
    return 0


def _merged_lines(merged: Merged) -> Iterator[str]:
    for warning in merged.warnings:
        yield f"warning: {warning}"
    for scope, settings in merged.rules.items():
        values = ((SETTING_PATHS[name], getattr(settings, name)) for name in SETTING_NAMES)
        yield f"{scope}: " + ", ".join(f"{path} {value}" for path, value in values if value is not None)
    if not merged.rules:
        yield "nothing is set"
