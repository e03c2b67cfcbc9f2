"""`kvpull calibrate`: arguments, files, kubectl. Measuring and fitting are in `epp.calibrate`."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from epp.core.errors import ConfigError

_KUBECTL_S = 60.0
DEFAULT_LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `kvpull calibrate` takes."""
    add = parser.add_argument
    add("--source", required=True, metavar="URL", help="engine to pull from (its own port)")
    add("--destination", required=True, metavar="URL", help="engine that pulls")
    add("--source-p2p", metavar="HOST:PORT", help="absent: as its kvpull_engine_info says")
    add("--model", help="absent: the first that the engines serve")
    add(
        "--lengths", type=_lengths, default=DEFAULT_LENGTHS, metavar="N,N,...", help="whole blocks, in tokens"
    )
    add("--repetitions", type=int, default=7)
    add("--max-repetitions", type=int, default=21, help="of lengths that are still too noisy")
    add(
        "--token-ids",
        type=_range,
        default=(256, 8191),
        metavar="LO-HI",
        help="ordinary ids of the vocabulary",
    )
    add(
        "--settle", type=float, default=0.0, metavar="SECONDS", help="stock engines offload a moment later: 1"
    )
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one answer")
    add("--max-noise", type=float, default=0.15, help="uncertainty of a median that is still accepted")
    add("--margin", type=float, default=0.25, help="of the threshold above the crossover")
    add("--accept-unverified", action="store_true", help="engines that do not count the bytes they move")
    add("--seed", type=int, help="of order and prompts; absent: random")
    add("--for-model", help="write an override for this model instead of the default")
    add("--for-source-class", help="write an override for this source class")
    add("--document", type=Path, metavar="FILE", help="write the PullThresholds document here")
    add("--config-map", type=Path, metavar="FILE", help="write it in a ConfigMap here")
    add(
        "--apply",
        action="store_true",
        help="apply the ConfigMap: by kubectl, else by this process's own account",
    )
    add("--name", default="kvpull-thresholds", help="of the ConfigMap")
    add("--namespace")
    add("--plot", type=Path, metavar="PNG", help="needs the extra `plots`")
    add("--json", action="store_true")
    add("--quiet", action="store_true", help="no progress on standard error")


def run(arguments: argparse.Namespace) -> int:
    """0: measured and written; 1: refused; 3: an engine could not be asked. Raises ConfigError."""
    from epp.calibrate import fit, report
    from epp.calibrate.probe import ProbeError

    if arguments.repetitions < 1 or not 0.0 <= arguments.margin <= 10.0 or not arguments.max_noise > 0.0:
        raise ConfigError("--repetitions must be at least 1, --margin 0 to 10, --max-noise above 0")
    limits = fit.Limits(max_uncertainty=arguments.max_noise)
    try:
        measured, block_size = _measure(arguments)
        found = fit.calibrate(measured.samples[fit.RECOMPUTE], measured.samples[fit.PULL], limits)
    except ProbeError as error:
        print(f"kvpull: {error}", file=sys.stderr)
        return 3
    except fit.Refused as refused:
        for sentence in (*refused.sentences, *(f"not counted: {line}" for line in measured.discarded)):
            print(f"kvpull: refused: {sentence}", file=sys.stderr)
        print(
            "kvpull: nothing was written; stop other traffic on the two engines and run it again, with more"
            " --max-repetitions or longer --lengths where samples are noisy",
            file=sys.stderr,
        )
        return 1
    scope = report.Scope(arguments.for_model, arguments.for_source_class)
    done = report.Report(measured, found, found.threshold_tokens(arguments.margin, block_size), scope)
    print(json.dumps(report.as_json(done)) if arguments.json else "\n".join(report.text(done)))
    return _write(arguments, done)


def _measure(arguments: argparse.Namespace) -> Any:
    from epp.calibrate.measure import Pair, Settings, check_lengths
    from epp.calibrate.probe import Engine, ProbeError, SourceName

    engines = [
        Engine(url, model=arguments.model, timeout_s=arguments.timeout)
        for url in (arguments.source, arguments.destination)
    ]
    infos = [engine.counters().info for engine in engines]
    if all(infos) and infos[0].get("instance") == infos[1].get("instance"):
        raise ProbeError("source and destination are one engine")
    block_size = int(infos[0].get("block_size") or 16)
    check_lengths(arguments.lengths, block_size)
    address = arguments.source_p2p or infos[0].get("p2p_addr")
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        raise ProbeError(
            f"{arguments.source}: its peer-to-peer address is not known; use --source-p2p HOST:PORT"
        )
    settings = Settings(
        arguments.lengths,
        arguments.repetitions,
        arguments.token_ids,
        arguments.settle,
        arguments.accept_unverified,
        arguments.seed,
        arguments.max_repetitions,
        arguments.max_noise,
    )
    progress = (lambda _: None) if arguments.quiet else _say
    pair = Pair(engines[0], engines[1], SourceName(host.strip("[]"), int(port)), settings, progress)
    return pair.run(), block_size


def _say(line: str) -> None:
    print(f"kvpull: {line}", file=sys.stderr)


def _write(arguments: argparse.Namespace, done: Any) -> int:
    from epp.calibrate import report

    config_map = report.config_map(done, arguments.name, arguments.namespace)
    try:
        if arguments.document:
            arguments.document.write_text(report.document(done))
        if arguments.config_map:
            arguments.config_map.write_text(config_map)
        if arguments.plot:
            report.plot(done, arguments.plot)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"--plot needs {error.name}: install kvpull[plots]") from error
    return _apply(config_map) if arguments.apply else 0


def _apply(config_map: str) -> int:
    if shutil.which("kubectl") is None:
        return _apply_without_kubectl(config_map)
    try:
        ended = subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=config_map, text=True, timeout=_KUBECTL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"kvpull: kubectl apply: {error}", file=sys.stderr)
        return 3
    return 0 if ended.returncode == 0 else 3


def _apply_without_kubectl(config_map: str) -> int:
    from epp.ops.config_map_writer import write_config_map
    from sidecar.pool_watch.access import Environment, KubeAccess
    from sidecar.pool_watch.errors import KubeError
    from sidecar.yaml_text import load_yaml

    async def write() -> str:
        access = KubeAccess(Environment.of_process())
        await access.open()
        try:
            return await write_config_map(access, manifest)
        finally:
            await access.close()

    manifest: Any = load_yaml(config_map, max_bytes=1 << 20)
    try:
        done = asyncio.run(write())
    except KubeError as error:
        print(f"kvpull: --apply: {error}", file=sys.stderr)
        return 3
    print(f"kvpull: ConfigMap {manifest['metadata']['name']} {done}", file=sys.stderr)
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part[:8]) <= 10**7 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected lengths such as 1024,2048,4096,8192")
    return tuple(sorted({int(part) for part in parts}))


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a range such as 256-8191")
    return int(low), int(high)
