"""`python -m deploy.local.engine`: one emulated engine until SIGTERM or SIGINT, or its parent's end."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence

from deploy.local.engine.config import EngineConfig, parse_arguments
from deploy.local.engine.server import Running, serving
from engine_plugin.transport import MoverDown

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a signal, 1 if the engine broke or could not start."""
    config, process = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=process.log_level.upper(),
        format=f"%(asctime)s {config.name} %(levelname)s %(name)s: %(message)s",
    )
    # whatever ends the parent ends the engine: nothing it owns outlives it, not even by SIGKILL
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        return asyncio.run(_serve(config, process.ready_fd))
    except (OSError, ValueError, MoverDown) as error:
        # a port in use, no room in /dev/shm, an unusable tokenizer: a sentence, not a traceback
        logging.getLogger(__name__).error("cannot serve on %s:%d: %s", config.host, config.port, error)
        return 1


async def _serve(config: EngineConfig, ready_fd: int | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(config) as running:
        _report_ready(running, ready_fd)
        running.failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
        return 1 if running.failed.done() else 0


def _report_ready(running: Running, ready_fd: int | None) -> None:
    if ready_fd is None:
        return
    with os.fdopen(ready_fd, "w") as pipe:
        pipe.write(json.dumps(running.ready_line()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
