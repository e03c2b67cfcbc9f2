"""`python -m sidecar`: settings, signals, one run. Exit status 2 for settings that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys

from sidecar.certificates import CertificateError
from sidecar.config import SidecarConfig, parse_config
from sidecar.endpoint_file import EndpointFileError
from sidecar.flags import ConfigError
from sidecar.pool_watch.errors import AccessError
from sidecar.server import Sidecar

_log = logging.getLogger("sidecar")


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        _log.error("%s", error)
        return 2
    logging.getLogger().setLevel(config.log_level)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config))
    except (EndpointFileError, AccessError, CertificateError, OSError) as error:
        _log.error("cannot start: %s", error)
        return 2


async def _serve(config: SidecarConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with Sidecar(config) as sidecar:
        _log.info("serving on %s", ", ".join(sidecar.addresses))
        _report_ready(config, sidecar)
        await stop.wait()
        _log.info("stopping: draining for at most %g s", config.drain_timeout_s)
    return 0


def _report_ready(config: SidecarConfig, sidecar: Sidecar) -> None:
    """One JSON line to the descriptor of whoever started us, if it is still listening."""
    if config.ready_fd is None:
        return
    line = {"ready": True, "addresses": sidecar.addresses, "metrics_port": config.metrics_port}
    with contextlib.suppress(BrokenPipeError), os.fdopen(config.ready_fd, "w") as pipe:
        pipe.write(json.dumps(line) + "\n")


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, else asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())
