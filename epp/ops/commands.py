"""The operators' sub-commands of `kvpull`: arguments here, work in the modules beside it.

Exit status of all: 0 found and fine, 1 found and not fine (or not found), 2 wrong usage or input, 3 a
picker could not be asked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from epp.ops.calibrate import add_arguments as add_calibrate_arguments
from epp.ops.calibrate import run as run_calibrate
from epp.ops.show_config import add_arguments as add_config_arguments
from epp.ops.size import add_arguments as add_size_arguments
from epp.ops.size import run as run_size


def add_commands(commands: Any) -> None:
    """Add explain, replay, calibrate, size, thresholds, config and doctor to an argparse sub-parser group."""
    explain = commands.add_parser("explain", help="say why a request got its destination and source")
    explain.add_argument("id", help="decision id or request id")
    _add_asking(explain)
    explain.set_defaults(run=_explain)

    replay = commands.add_parser("replay", help="decide a recorded ledger again under other thresholds")
    replay.add_argument("ledger", type=Path, nargs="+", help="JSONL files written with --ledger-file")
    replay.add_argument(
        "--thresholds",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="PullThresholds; repeatable",
    )
    replay.add_argument("--producer-delta", type=int, help="minCachedTokenDelta of p2p-source-producer")
    replay.add_argument("--show", type=int, default=20, metavar="N", help="differences to print (20)")
    replay.add_argument("--json", action="store_true", help="one JSON object instead of text")
    replay.set_defaults(run=_replay)

    calibrate = commands.add_parser("calibrate", help="measure recompute against pull on a pair of engines")
    add_calibrate_arguments(calibrate)
    calibrate.set_defaults(run=run_calibrate)

    size = commands.add_parser(
        "size", help="how much memory a model's pulls need, and whether they will help"
    )
    add_size_arguments(size)
    size.set_defaults(run=run_size)

    thresholds = commands.add_parser("thresholds", help="PullThresholds: what is in force, is a file good")
    actions = thresholds.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="what is in force in running pickers")
    _add_asking(show)
    show.set_defaults(run=_show)
    check = actions.add_parser("check", help="validate documents and merge them as a picker would")
    check.add_argument("files", type=Path, nargs="+")
    check.set_defaults(run=_check)
    add_config_arguments(
        commands.add_parser("config", help="EndpointPickerConfig: is a file good, and what does it mean")
    )
    _add_doctor(commands)


def _add_asking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="metrics port of a picker, repeatable: one for each replica (http://127.0.0.1:9090)",
    )
    parser.add_argument("--token-file", type=Path, required=True, help="bearer token of /debug/kvpull")
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="PEM authority of https pickers, besides the system's"
    )
    parser.add_argument(
        "--client-cert-dir", type=Path, metavar="DIR", help="tls.crt and tls.key, where a picker asks for one"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for one picker")
    parser.add_argument("--json", action="store_true", help="the answer as it came")


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="is this fleet able to pull; if not, what is wrong")
    _add_asking(doctor)
    doctor.add_argument("--gateway", metavar="URL", help="sends a prompt through it, twice")
    doctor.add_argument(
        "--sidecar-metrics-port", type=int, metavar="PORT", help="of the sidecars (--metrics-port)"
    )
    doctor.add_argument(
        "--sidecar-metrics-scheme",
        choices=("http", "https"),
        default="http",
        help="https: not verified, since pods are asked by address; nothing secret is sent",
    )
    doctor.add_argument(
        "--routing-key-file", type=Path, help="signs the doctor's source headers, where sidecars want that"
    )
    doctor.add_argument("--model", help="name to ask for (default: the first that an engine serves)")
    doctor.add_argument(
        "--request-timeout", type=float, default=30.0, metavar="SECONDS", help="for one prompt"
    )
    doctor.add_argument(
        "--settle",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="longest until a picker has heard of its engines, and of what one computed",
    )
    doctor.add_argument("--passive", action="store_true", help="look only, send no prompt")
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from epp.ops.doctor.command import doctor

    return doctor(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    from epp.ops.explain import explain

    return explain(arguments)


def _replay(arguments: argparse.Namespace) -> int:
    from epp.ops.replay import replay

    return replay(arguments)


def _show(arguments: argparse.Namespace) -> int:
    from epp.ops.show_thresholds import show

    return show(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from epp.ops.show_thresholds import check

    return check(arguments)
