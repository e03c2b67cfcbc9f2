"""Processes of `benchmarks.extproc`: one engine under many loopback addresses, pickers, one Envoy.

Envoy has a listener without the filter, and one for each picker: `tokens` knows the tokenizer, `load`
has none (the hop without tokenising), `bare` is the floor of the library. The first two are `python -m epp`
as deployed: TLS, uvloop. No picker has a health check here: only requests are counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local import envoy
from deploy.local.ports import ControlPorts

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "config" / "tokenizer"
FIRST_PORT = 18_480  # of Envoy's listeners
SCORERS = ("queue-scorer", "kv-cache-utilization-scorer", "active-request-scorer")
PRECISE = ("precise-prefix-cache-producer", "prefix-cache-scorer", "p2p-source-producer")


@dataclass(frozen=True, slots=True)
class Process:
    """Something whose CPU time is asked for."""

    pid: int

    def cpu_s(self) -> float:
        """CPU time of all its threads so far, in steps of nanoseconds (`/proc/PID/stat` has 10 ms)."""
        total_ns = 0
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                total_ns += int((thread / "schedstat").read_text().split()[0])
        return total_ns / 1e9


@dataclass(frozen=True, slots=True)
class Rig:
    """Where to ask, and whose CPU time counts."""

    routes: dict[str, tuple[str, int]]
    pickers: dict[str, Process]
    gateway: Process


@contextlib.contextmanager
def running(directory: Path, *, endpoints: int, slow_scrape: bool = True) -> Iterator[Rig]:
    """Everything, until the block ends."""
    with contextlib.ExitStack() as stack:
        engine = _start(
            stack, *_module("benchmarks.sidecar_engine", "--host", "0.0.0.0"), stdout=subprocess.PIPE
        )
        assert engine.stdout is not None
        port = int(engine.stdout.readline())
        rows = [
            {"pod": f"e{number}", "host": f"127.0.9.{number + 1}", "serving_port": port, "replay_port": 0}
            for number in range(endpoints)
        ]
        (directory / "endpoints.json").write_text(json.dumps({"endpoints": rows}))
        interval = "5s" if slow_scrape else "50ms"
        pickers = {
            "tokens": _picker(stack, directory, "tokens", interval, "--tokenizer", str(TOKENIZER)),
            "load": _picker(stack, directory, "load", interval),
        }
        ports = {name: given["grpc_port"] for name, (_, given) in pickers.items()}
        processes = {name: process for name, (process, _) in pickers.items()}
        bare = _start(stack, *_module("benchmarks.extproc_bare", f"127.0.9.1:{port}"), stdout=subprocess.PIPE)
        assert bare.stdout is not None
        ports["bare"], processes["bare"] = int(bare.stdout.readline()), bare
        bootstrap = directory / "envoy.json"
        bootstrap.write_text(json.dumps(_bootstrap(port, ports)))
        gateway = _start(stack, *envoy.EnvoyCommand(envoy.find_binary(), bootstrap).argv())
        names = ("plain", *ports)
        yield Rig(
            {name: ("127.0.0.1", FIRST_PORT + number) for number, name in enumerate(names)},
            {name: Process(process.pid) for name, process in processes.items()},
            Process(gateway.pid),
        )


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return sys.executable, "-m", name, *arguments


def _start(
    stack: contextlib.ExitStack, *argv: str, stdout: int | None = None, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(argv, stdout=stdout, pass_fds=pass_fds, cwd=ROOT)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _picker(
    stack: contextlib.ExitStack, directory: Path, name: str, interval: str, *more: str
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    config = directory / f"{name}.json"
    config.write_text(json.dumps(_config(precise=name == "tokens")))
    read_fd, write_fd = os.pipe()
    process = _start(
        stack,
        *_module("epp", "--listen-host", "127.0.0.1", "--ready-fd", str(write_fd)),
        *("--config-file", str(config), "--endpoints-file", str(directory / "endpoints.json")),
        *("--refresh-metrics-interval", interval, "--log-level", "error", "--lame-duck", "0s"),
        *("--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0", *more),
        pass_fds=(write_fd,),
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        return process, json.loads(pipe.readline())


def _config(*, precise: bool) -> dict[str, Any]:
    plugins: list[dict[str, Any]] = [{"type": name} for name in (*SCORERS, "max-score-picker")]
    scored = [{"pluginRef": name, "weight": 2} for name in SCORERS]
    if precise:
        named = {"prefixMatchInfoProducerName": PRECISE[0]}
        plugins.append({"type": PRECISE[0]})
        plugins.append({"type": PRECISE[1], "parameters": named})
        plugins.append({"type": PRECISE[2], "parameters": named | {"minCachedTokenDelta": 2048}})
        scored.append({"pluginRef": PRECISE[1], "weight": 2})
    profile = {"name": "default", "plugins": [*scored, {"pluginRef": "max-score-picker"}]}
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [profile],
    }


def _bootstrap(engine_port: int, pickers: dict[str, int]) -> dict[str, Any]:
    """The local fleet's bootstrap, its gateway listener once for each picker, and once without."""
    result: dict[str, Any] = {}
    for number, (name, port) in enumerate([("plain", 1), *pickers.items()]):
        ports = ControlPorts(FIRST_PORT + number, FIRST_PORT + 10, FIRST_PORT + 11, port, 0, 0)
        listeners, clusters = _parts(envoy.bootstrap(ports), name)
        if name == "plain":
            _pass_through(listeners[0], clusters[0], engine_port)
            clusters = clusters[:1]
            result = envoy.bootstrap(ports) | {"static_resources": {"listeners": [], "clusters": []}}
        result["static_resources"]["listeners"] += listeners
        result["static_resources"]["clusters"] += clusters
    return result


def _parts(bootstrap: dict[str, Any], name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The gateway listener and both clusters, under names of their own."""
    text = json.dumps(bootstrap["static_resources"])
    for old in ("destinations", "picker", "gateway"):
        text = text.replace(f'"{old}"', f'"{old}-{name}"')
    parts = json.loads(text)
    parts["clusters"][1].pop("health_checks")
    return parts["listeners"][:1], parts["clusters"]


def _pass_through(listener: dict[str, Any], cluster: dict[str, Any], engine_port: int) -> None:
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][-1:]
    for key in ("lb_policy", "original_dst_lb_config"):
        del cluster[key]
    address = {"socket_address": {"address": "127.0.9.1", "port_value": engine_port}}
    endpoint = {"endpoint": {"address": address}}
    cluster |= {
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": cluster["name"],
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
