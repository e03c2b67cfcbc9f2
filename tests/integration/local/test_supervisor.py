"""Real processes: readiness, failures with their last words, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from deploy.local.supervisor import PartFailed, PartSpec, Supervisor

_READY = """
import json, os, sys
fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
def ready(**more):
    os.write(fd, json.dumps({"ready": True, **more}).encode() + b"\\n")
    os.close(fd)
"""
_SERVE = _READY + "import time\nready(port=1)\ntime.sleep(600)\n"
_WITH_CHILD = (
    _READY
    + "import subprocess, time\n"
    + "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    + "ready(child=child.pid)\ntime.sleep(600)\n"
)
_STUBBORN = (
    _READY + "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(600)\n"
)


def _spec(name: str, code: str, *, ready_s: float = 20.0, stop_s: float = 5.0) -> PartSpec:
    argv = (sys.executable, "-c", code)
    return PartSpec(name, argv, ready_timeout_s=ready_s, stop_timeout_s=stop_s)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    made = Supervisor(tmp_path / "logs")
    try:
        yield made
    finally:
        await made.stop_all()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _process_fd(pid: int) -> Iterator[int]:
    """Holds a process by identity, so that a reused pid cannot fool the test."""
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


async def test_ready_line_is_returned_and_stop_ends_the_process(supervisor: Supervisor) -> None:
    part = await supervisor.start(_spec("one", _SERVE))
    assert part.ready == {"ready": True, "port": 1}
    assert supervisor.pids == {"one": part.process.pid}
    await supervisor.stop("one")
    assert part.process.returncode == -signal.SIGTERM
    assert supervisor.pids == {}


async def test_part_that_dies_before_ready_shows_its_last_words(supervisor: Supervisor) -> None:
    code = "import sys\nprint('the reason is here')\nsys.exit(3)"
    with pytest.raises(PartFailed) as caught:
        await supervisor.start(_spec("broken", code))
    text = str(caught.value)
    assert "broken ended with exit code 3 before it was ready" in text
    assert "the reason is here" in text
    assert supervisor.pids == {}


async def test_part_that_is_never_ready_is_ended(supervisor: Supervisor) -> None:
    with pytest.raises(PartFailed, match=r"slow was not ready after 1 s"):
        await supervisor.start(_spec("slow", "import time; time.sleep(600)", ready_s=1.0))
    assert supervisor.pids == {}


async def test_missing_program_is_a_sentence(supervisor: Supervisor) -> None:
    with pytest.raises(PartFailed, match=r"ghost cannot be started: .*No such file"):
        await supervisor.start(PartSpec("ghost", ("/no/such/program",)))


async def test_something_else_than_a_ready_line_is_refused(supervisor: Supervisor) -> None:
    code = "import os, sys, time\nos.write(int(sys.argv[-1]), b'hello\\n')\ntime.sleep(600)"
    with pytest.raises(PartFailed, match=r"something else than its ready line"):
        await supervisor.start(_spec("odd", code))


async def test_unexpected_end_is_reported_with_the_part_and_how_it_ended(supervisor: Supervisor) -> None:
    part = await supervisor.start(_spec("victim", _SERVE))
    await supervisor.start(_spec("other", _SERVE))
    os.kill(part.process.pid, signal.SIGKILL)
    failure = await asyncio.wait_for(supervisor.failure(), 20)
    assert "victim ended with signal SIGKILL by itself" in str(failure)


async def test_kill_takes_children_along_and_is_no_failure(supervisor: Supervisor) -> None:
    part = await supervisor.start(_spec("parent", _WITH_CHILD))
    await supervisor.kill("parent")
    assert part.process.returncode == -signal.SIGKILL
    assert not _alive(part.ready["child"])
    again = await supervisor.start(_spec("parent", _WITH_CHILD))
    assert again.process.pid != part.process.pid
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(supervisor.failure(), 0.05)


async def test_stop_is_bounded_for_a_part_that_ignores_sigterm(supervisor: Supervisor) -> None:
    part = await supervisor.start(_spec("stubborn", _STUBBORN, stop_s=0.2))
    await supervisor.stop("stubborn")
    assert part.process.returncode == -signal.SIGKILL


async def test_stop_all_reaps_the_children_of_a_part_that_crashed(supervisor: Supervisor) -> None:
    part = await supervisor.start(_spec("parent", _WITH_CHILD))
    os.kill(part.process.pid, signal.SIGKILL)
    await asyncio.wait_for(supervisor.failure(), 20)
    await supervisor.stop_all()
    assert not _alive(part.ready["child"])


def test_sigkill_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio, sys
        from pathlib import Path
        from deploy.local.supervisor import PartSpec, Supervisor
        async def main():
            supervisor = Supervisor(Path({str(tmp_path)!r}))
            part = await supervisor.start(PartSpec("one", (sys.executable, "-c", {_SERVE!r})))
            print(part.process.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        with _process_fd(pid) as fd:
            process.kill()
            process.wait(20)
            ended, _, _ = select.select([fd], [], [], 20)  # a pidfd is readable once its process has ended
    assert ended
