"""The double as a server of its own, for clients that have a kubeconfig only: `python -m tests.kube FILE`.

Over TLS, and nobody gets in without a token: kubectl sends none over plain HTTP. On standard output one line
when it serves; at its end (SIGTERM) one with the namespaces that are left and how many requests there were.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from pathlib import Path

from tests.kube import kinds
from tests.kube.rbac import ADMIN
from tests.kube.server import kube_server
from tests.kube.tls import write_certificate


async def serve(kubeconfig: Path) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    authority, tls = write_certificate(kubeconfig.parent)
    async with kube_server(tls=tls, bookmark_every_s=1.0) as server:
        token = secrets.token_urlsafe(24)
        server.authority.tokens[token] = ADMIN
        server.write_kubeconfig(kubeconfig, token=token, authority=authority)
        print(json.dumps({"ready": True}), flush=True)
        await stop.wait()
        namespaces = [name for _, name in server.store.table(kinds.NAMESPACES.key).objects]
        print(json.dumps({"namespaces": sorted(namespaces), "requests": len(server.requests)}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
