"""Finding an engine's processes, and the shared memory that they have mapped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deploy.local.errors import FleetError
from deploy.local.vllm.faults import _process, _shared_memory

CHILD = """
import sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
print(memory.name, flush=True)
sys.stdin.read()
memory.close(); memory.unlink()
"""


def test_a_process_of_the_group_and_what_it_has_mapped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, "a-title"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert _process(child.pid, b"a-title") == child.pid
        assert [path.name for path in _shared_memory(child.pid)] == [name]
        assert name not in [path.name for path in _shared_memory(os.getpgid(0))]
        with pytest.raises(FleetError, match="no process of group"):
            _process(child.pid, b"another title")
        child.communicate("", timeout=30)
    assert child.returncode == 0
