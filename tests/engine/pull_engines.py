"""vLLM engines with the plugin (`deploy.local.vllm.site`), and what a test asks of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from deploy.local.vllm import environment as vllm
from tests.engine import processes
from tests.ports import free_ports

BLOCK_TOKENS: Final = 32
BYTES_A_TOKEN: Final = 512  # 2 layers x (K, V) x 2 heads x 32 x bfloat16, see `model`
BLOCK_BYTES: Final = BLOCK_TOKENS * BYTES_A_TOKEN
TIER_BYTES: Final = 16 << 20  # 1,024 blocks
KEY: Final = b"a-pool-key-of-thirty-two-bytes-!"
ANSWER_TOKENS: Final = 8
WAIT_S: Final = 120.0
POLL_S: Final = 0.1
_numbers = count(100)


def connector_config(p2p_port: int, key_file: Path | None, **tier: Any) -> dict[str, Any]:
    """The value of --kv-transfer-config."""
    auth = {"insecure": True} if key_file is None else {"peer_key_file": str(key_file)}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "PullOffloadingSpec",
            "cpu_bytes_to_use": TIER_BYTES,
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
            "secondary_tiers": [
                {"type": "kvpull", "host": "127.0.0.1", "port": p2p_port, **auth, "model": "m", **tier}
            ],
        },
    }


def events_config() -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
        "topic": "kv@engine",
        "buffer_steps": 10_000,
    }


def arguments(
    model: Path, port: int, transfer: Mapping[str, Any] | None, more: Sequence[str] = ()
) -> list[str]:
    options = {
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--block-size": str(BLOCK_TOKENS),
        "--max-model-len": "8192",
        "--max-num-seqs": "8",
        "--num-gpu-blocks-override": "400",
        "--kv-events-config": json.dumps(events_config()),
    }
    if transfer is not None:
        options["--kv-transfer-config"] = json.dumps(transfer)
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), "--enforce-eager"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *more]
    return command + [word for option in options.items() for word in option]


def environment(site: Path) -> dict[str, str]:
    """One thread an engine, for there are several; with the plugin installed in `site`."""
    return vllm.environment(threads=1) | {"PYTHONPATH": str(site)}


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens`: the answer's ids. `cached`: prompt tokens that were not computed."""

    tokens: list[int]
    cached: int


@dataclass(slots=True)
class PullEngine:
    """One running engine."""

    name: str
    url: str
    p2p_port: int
    process: processes.Process = field(repr=False)

    def complete(
        self,
        prompt: Sequence[int],
        *,
        params: Mapping[str, Any] | None = None,
        salt: str | None = None,
        model: str = "m",
        tokens: int = ANSWER_TOKENS,
        timeout_s: float = 120.0,
    ) -> Answer:
        """Greedy; raises `urllib.error.HTTPError` unless answered with 200."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        if salt is not None:
            body["cache_salt"] = salt
        answer = post(f"{self.url}/v1/completions", body, timeout_s)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(answer["choices"][0]["token_ids"], int(details.get("cached_tokens") or 0))

    def pull_from(self, source: PullEngine, kv_request_id: str = "test") -> dict[str, Any]:
        """The parameters by which the sidecar names `source`."""
        return source_params("127.0.0.1", source.p2p_port, kv_request_id)

    def metrics(self) -> dict[str, float]:
        """Every sample as `name{labels without vLLM's own}` -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return dict(_samples(answer.read().decode()))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.split("{")[0] == name and all(one in sample for one in wanted)
        )

    def info(self) -> dict[str, str]:
        """Labels of `kvpull_engine_info`."""
        (sample,) = (sample for sample in self.metrics() if sample.startswith("kvpull_engine_info{"))
        return dict(re.findall(r'(\w+)="([^"]*)"', sample))

    def clear_device(self) -> None:
        """Empty the device cache; the CPU tier keeps what it has."""
        post(f"{self.url}/reset_prefix_cache", None, 60.0)

    def tier_rows(self) -> set[bytes]:
        """The blocks in this engine's CPU tier that hold anything, read behind its back."""
        content = _tier_file(self.process.pid).read_bytes()
        rows = (content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES))
        return {row for row in rows if row.strip(b"\0")}


@contextlib.contextmanager
def start_engines(
    model: Path,
    root: Path,
    site: Path,
    key_file: Path | None,
    tiers: Mapping[str, Mapping[str, Any] | None],
    flags: Sequence[str] = (),
) -> Iterator[dict[str, PullEngine]]:
    """Start engines at the same time, by name; settings None: an engine without a CPU tier."""
    engines = {}
    try:
        for name, settings in tiers.items():
            port, p2p_port = free_ports(2)
            transfer = None if settings is None else connector_config(p2p_port, key_file, **settings)
            more = environment(site)
            if key_file is not None:
                more["KVPULL_SALT_KEY_FILE"] = str(key_file)
            process = processes.Process(arguments(model, port, transfer, flags), root / f"log-{name}", more)
            engines[name] = PullEngine(name, f"http://127.0.0.1:{port}", p2p_port, process)
        for engine in engines.values():
            engine.process.wait_ready([f"{engine.url}/health"])
        yield engines
    finally:
        for engine in engines.values():
            engine.process.stop()


def source_params(host: str, port: int, kv_request_id: str = "test") -> dict[str, Any]:
    return {"remote_kv_source": {"kv_request_id": kv_request_id, "remote_host": host, "remote_port": port}}


def post(url: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        raw = answer.read()
    return json.loads(raw) if raw.strip().startswith(b"{") else None


def fresh(blocks: int, more: int = 5) -> list[int]:
    """A prompt that no other test sends: engines are shared by all of them."""
    return prompt(next(_numbers), blocks, more)


def prompt(number: int, blocks: int, more: int = 5) -> list[int]:
    """`blocks` whole blocks and `more` tokens; below 7,000 no two numbers begin alike."""
    return [
        20 + (number * 7919 + place * place * 31 + place * 17) % 7000 for place in range(blocks * 32 + more)
    ]


def _samples(page: str) -> Iterator[tuple[str, float]]:
    for line in page.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        sample, _, value = line.rpartition(" ")
        yield re.sub(r'(engine|model_name)="[^"]*",?', "", sample), float(value)


def processes_of(group: int) -> list[int]:
    """Every process of the group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def mover_of(engine: PullEngine) -> int:
    """The process that has this engine's NIXL agent."""
    for pid in processes_of(engine.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"engine_plugin.transport.mover" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise AssertionError(f"engine {engine.name} has no mover")


def until(holds: Callable[[], bool]) -> None:
    """Raises `TimeoutError` when `holds` does not come true."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {WAIT_S:.0f} s")
        threading.Event().wait(POLL_S)


def _tier_file(group: int) -> Path:
    for pid in processes_of(group):
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if "vllm_offload" in os.readlink(entry):
                    return entry
        except (FileNotFoundError, PermissionError):
            continue
    raise AssertionError("no process of this engine has a CPU tier")
