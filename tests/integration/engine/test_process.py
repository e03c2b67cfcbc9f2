"""The engine as a process: ready line, refusal to start in a sentence, an end without leftovers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.local.engine.config import parse_arguments
from tests.integration.engine.rig import BOUND_S, TOKENIZER, prompt_ids, until

ROOT = Path(__file__).parents[3]
HOST = "127.0.9.251"
PORTS = ("--port=0", "--p2p-port=0", "--events-port=0", "--replay-port=0")
SMALL = ("--device-tokens=4096", "--cpu-tokens=4096", "--max-model-len=4096")


@asynccontextmanager
async def engine_process(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A process and the read end of its ready pipe; killed at the end if it still runs."""
    read_fd, write_fd = os.pipe()
    argv = ("-m", "deploy.local.engine", "--tokenizer", str(TOKENIZER), "--host", HOST, "--model", "m")
    argv += ("--insecure",)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        *PORTS,
        *SMALL,
        "--ready-fd",
        str(write_fd),
        *options,
        cwd=ROOT,
        pass_fds=(write_fd,),
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(write_fd)
    try:
        yield process, read_fd
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(BOUND_S):
            await process.communicate()


async def ready_line(read_fd: int) -> dict[str, Any]:
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0)
    )
    try:
        async with asyncio.timeout(BOUND_S):
            line: dict[str, Any] = json.loads(await reader.readline())
            return line
    finally:
        pipe.close()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def alive(pid: int) -> bool:
    """Running, and not a zombie that only waits to be reaped by the system."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_ready_serve_end_without_leftovers(number: signal.Signals) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    async with engine_process() as (process, read_fd), aiohttp.ClientSession() as session:
        ready = await ready_line(read_fd)
        assert ready["ready"] is True
        assert all(ready[name] > 0 for name in ("port", "p2p_port", "events_port", "replay_port"))
        body = {"model": "m", "prompt": prompt_ids(40), "max_tokens": 3}
        async with session.post(f"http://{HOST}:{ready['port']}/v1/completions", json=body) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 3
        movers = children(process.pid)
        assert len(movers) == 1
        process.send_signal(number)
        async with asyncio.timeout(BOUND_S):
            _, log = await process.communicate()
        await until(lambda: not any(alive(pid) for pid in movers))
        assert process.returncode == (0 if number is signal.SIGTERM else -number)
        assert b"Traceback" not in log
    assert set(os.listdir("/dev/shm")) <= shm_before


async def test_sigterm_in_mid_answer_ends_it_within_the_drain_time() -> None:
    async with (
        engine_process("--drain-s=0.2", "--time-scale=100") as (process, read_fd),
        aiohttp.ClientSession() as session,
    ):
        ready = await ready_line(read_fd)
        body = {"model": "m", "prompt": prompt_ids(40), "max_tokens": 100}
        url = f"http://{HOST}:{ready['port']}/v1/completions"
        task = asyncio.create_task(session.post(url, json=body))
        async with asyncio.timeout(BOUND_S):
            while True:
                async with session.get(f"http://{HOST}:{ready['port']}/metrics") as response:
                    if 'vllm:num_requests_running{engine="0",model_name="m"} 1.0' in await response.text():
                        break
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(BOUND_S):
            await process.communicate()
        assert process.returncode == 0
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("option", ["--port", "--events-port", "--replay-port", "--p2p-port"])
async def test_port_in_use_is_a_sentence(option: str) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        async with engine_process(option, str(port)) as (process, read_fd):
            async with asyncio.timeout(BOUND_S):
                _, log = await process.communicate()
            os.close(read_fd)
    assert process.returncode == 1
    assert b"in use" in log
    assert b"Traceback" not in log


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--block-size=0",), b"block"),
        (("--max-model-len=5000",), b"--device-tokens"),
        (("--kv-bytes-per-token=12",), b"multiple of 8"),
        (("--tokenizer=/nonexistent",), b"tokenizer.json"),
        (("--peer-key-file=/nonexistent",), b"/nonexistent"),
        (("--peer-key-file=/dev/null",), b"there is no key in it"),
        (("--hash-algo=md5",), b"sha256"),
        (("--cpu-tokens=999999999999",), b"/dev/shm"),
    ],
)
async def test_bad_settings_are_a_sentence(options: tuple[str, ...], word: bytes) -> None:
    async with engine_process(*options) as (process, read_fd):
        async with asyncio.timeout(BOUND_S):
            _, log = await process.communicate()
        os.close(read_fd)
    assert process.returncode in (1, 2)
    assert word in log
    assert b"Traceback" not in log


def test_without_a_key_only_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--tokenizer", str(TOKENIZER)])
    assert "--peer-key-file is needed" in capsys.readouterr().err
    config, _ = parse_arguments(["--tokenizer", str(TOKENIZER), "--insecure"])
    assert config.peer_keys == ()
