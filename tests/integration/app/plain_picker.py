"""A picker's process that routes by load: what tests of its surroundings need."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[3]
CONFIG = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [{"type": "active-request-scorer"}, {"type": "max-score-picker"}],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [{"pluginRef": "active-request-scorer"}, {"pluginRef": "max-score-picker"}],
        }
    ],
}


@asynccontextmanager
async def picker(
    folder: Path,
    flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    log: IO[bytes] | None = None,
) -> AsyncIterator[tuple[Process, dict[str, int]]]:
    """The process and its ports; `folder` has an endpoints.json. `log`: where it goes instead of ours."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    read_fd, write_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epp", "--listen-host", "127.0.0.1", "--ready-fd", str(write_fd)),
        *("--config-file", str(folder / "config.json"), "--endpoints-file", str(folder / "endpoints.json")),
        *("--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0", "--log-level", "error"),
        *flags,
        cwd=ROOT,
        pass_fds=(write_fd,),
        env=os.environ | (environment or {}),
        stderr=log,
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as pipe:
            line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), 60)
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
