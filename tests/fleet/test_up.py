"""`python -m deploy.local up` as a person uses it, and every way in which it may end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local.spec import ROOT
from tests.fleet.processes import descendants, shared_memory_files, still_alive, watched

_BLOCK, _OFFSET = "127.0.42", 2500
_CURL = re.compile(r"curl -s (\S+) .* -d '(.*)'")
_PARTS = ("deploy.local.engine", "transport.mover", "-m sidecar", "-m epp", "envoy")

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(120)]


def _command(out_dir: Path, *more: str) -> list[str]:
    arguments = ("--address-block", _BLOCK, "--port-offset", str(_OFFSET), "--out", str(out_dir))
    return [sys.executable, "-m", "deploy.local", "up", *arguments, *more]


@contextmanager
def _up(out_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A fleet that is up, with the URL and the body of the curl line that it printed."""
    process = subprocess.Popen(
        _command(out_dir), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = _CURL.search(line)
            if found is not None:
                yield process, found.group(1), found.group(2)
                return
        pytest.fail(f"no curl line; stderr: {process.stderr.read() if process.stderr else ''}")
    finally:
        process.kill()
        process.communicate()


def _parts_of(process: subprocess.Popen[str]) -> dict[int, str]:
    parts = descendants(process.pid)
    for name in _PARTS:
        assert any(name in command for command in parts.values()), f"{name} is not among {parts}"
    return parts


def test_printed_request_works_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    files_before = shared_memory_files()
    with _up(tmp_path) as (process, url, body):
        request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            document = json.load(answer)
        assert document["usage"]["completion_tokens"] == 16
        with watched(_parts_of(process)) as fds:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert still_alive(fds, within_s=1.0) == []
    assert shared_memory_files() == files_before
    assert not (tmp_path / "run").exists()


def test_sigkill_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    files_before = shared_memory_files()
    with _up(tmp_path) as (process, _, _), watched(_parts_of(process)) as fds:
        process.kill()
        process.wait(20)
        assert still_alive(fds, within_s=20.0) == []
    assert shared_memory_files() == files_before


def test_crash_of_a_part_ends_the_fleet_with_a_sentence_that_names_it(tmp_path: Path) -> None:
    files_before = shared_memory_files()
    with _up(tmp_path) as (process, _, _), watched(parts := _parts_of(process)) as fds:
        victim = next(pid for pid, command in parts.items() if "--name engine-b" in command)
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 2
        assert "engine-b ended with signal SIGKILL by itself" in errors
        assert "Traceback" not in errors
        assert still_alive(fds, within_s=1.0) == []
    assert shared_memory_files() == files_before


def test_taken_port_is_a_sentence_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 8080 + _OFFSET))
        taken.listen(1)
        done = subprocess.run(
            _command(tmp_path), capture_output=True, text=True, cwd=ROOT, timeout=30, check=False
        )
    assert done.returncode == 2
    assert f"port {8080 + _OFFSET} on 127.0.0.1 (needed for the gateway)" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_memory_is_a_sentence(tmp_path: Path) -> None:
    command = _command(tmp_path, "--cpu-tier-tokens", str(1 << 40))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    assert done.returncode == 2
    assert "Too little memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_directory_of_another_fleet_is_refused(tmp_path: Path) -> None:
    with _up(tmp_path):
        arguments = ["--address-block", "127.0.43", "--port-offset", "3500", "--out", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "deploy.local", "up", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=30,
            check=False,
        )
    assert done.returncode == 2
    assert "Another fleet uses" in done.stderr
    assert "--out" in done.stderr
