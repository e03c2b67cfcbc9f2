"""`kvpull config`: is a configuration good, and what does it mean. Reads files only; asks no picker."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from epp.config import load_config
from epp.config.explanation import ExplainedPlugin, Explanation
from epp.core.errors import ConfigError


def add_arguments(config: argparse.ArgumentParser) -> None:
    """Add the actions to `kvpull config`."""
    actions = config.add_subparsers(dest="action", required=True)
    check_parser = actions.add_parser("check", help="would a picker start with it (for CI)")
    check_parser.add_argument("files", type=Path, nargs="+")
    check_parser.add_argument(
        "--strict", action="store_true", help="warnings are failures too (exit status 1)"
    )
    check_parser.set_defaults(run=check)
    explain_parser = actions.add_parser("explain", help="wiring, everything that was added, every warning")
    explain_parser.add_argument("file", type=Path)
    explain_parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    explain_parser.set_defaults(run=explain)


def check(arguments: argparse.Namespace) -> int:
    """All files are looked at. 0: all good; 1: warnings, with --strict; 2: one would not start."""
    refused = warned = False
    for path in arguments.files:
        try:
            notes = load_config(path).notes
        except ConfigError as error:
            refused = True
            print(f"kvpull: {error}", file=sys.stderr)
            continue
        warned = warned or bool(notes)
        for note in notes:
            print(f"{path}: warning: {note}")
        print(f"{path}: good")
    return 2 if refused else int(warned and arguments.strict)


def explain(arguments: argparse.Namespace) -> int:
    """0: explained; ConfigError (2): it would not start."""
    explanation = load_config(arguments.file).explanation
    assert explanation is not None
    if arguments.json:
        print(json.dumps(explanation.as_json(), indent=2))
    else:
        print("\n".join(_lines(explanation)))
    return 0


def _lines(explanation: Explanation) -> Iterator[str]:
    yield "stages"
    yield from (f"  {stage}" for stage in explanation.stages)
    for profile in explanation.profiles:
        yield f"profile {profile.name}"
        yield f"  filters: {' -> '.join(profile.filters) or 'none'}"
        scorers = ", ".join(f"{name} x {weight:g}" for name, weight in profile.scorers)
        yield f"  scorers: {scorers or 'none'}"
        yield f"  picker: {profile.picker}"
    yield "wiring"
    for consumer, data, producer, how in explanation.wiring:
        yield f"  {consumer} reads {data} of {producer} ({how})"
    if not explanation.wiring:
        yield "  nobody reads anything of another plugin"
    yield "plugins"
    for plugin in explanation.plugins:
        yield from _plugin_lines(plugin)
    gates = ", ".join(f"{name}={str(value).lower()}" for name, value in explanation.gates.items())
    yield f"feature gates: {gates}"
    yield "warnings" if explanation.notes else "no warnings"
    yield from (f"  {note}" for note in explanation.notes)


def _plugin_lines(plugin: ExplainedPlugin) -> Iterator[str]:
    named = plugin.name if plugin.name == plugin.type_name else f"{plugin.name} ({plugin.type_name})"
    yield f"  {named}: {plugin.kind}" + (f", ADDED: {plugin.added}" if plugin.added else "")
    for name, value in plugin.parameters.items():
        default = " (default)" if name in plugin.defaults else ""
        yield f"    {name}: {json.dumps(value)}{default}"
