"""What the picker's image must do without: the `epp` extra has neither numpy nor NIXL."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["epp.app", "epp.orders.sender"])
def test_the_picker_starts_without_what_only_engines_have(module: str) -> None:
    code = (
        "import sys\n"
        "for name in ('numpy', 'nixl', 'torch', 'vllm', 'matplotlib'): sys.modules[name] = None\n"
        f"import {module}\n"
        "from engine_plugin.transport.orders import PrefetchOrders\n"
        "import asyncio\n"
        "async def make(): await PrefetchOrders([b'k' * 32]).stop()\n"
        "asyncio.run(make())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


_SERVE = """
import asyncio, os, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))

sys.meta_path.insert(0, Look())
import epp.app
from epp.extproc.server import ExtProcServer, ServerSettings

async def main():
    settings = ServerSettings(host="127.0.0.1", port=0, health_port=None, secure=False, lame_duck_s=0.0)
    server = ExtProcServer(None, ready=lambda: True, settings=settings)
    await server.start()
    await server.stop()

asyncio.run(main())
"""


def test_grpc_is_told_which_poller_to_use_before_it_is_loaded() -> None:
    """Later it would not listen; a name that the pinned version does not know is an error on stderr."""
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_EXPERIMENTS"}
    command = [sys.executable, "-c", _SERVE]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout == "-event_engine_listener\n"
    assert "experiment" not in ended.stderr.lower()
    given = environment | {"GRPC_EXPERIMENTS": "event_engine_listener"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=given)
    assert ended.stdout == "event_engine_listener\n", "an operator's own setting wins"


def test_what_needs_numpy_is_there_when_it_is_asked_for() -> None:
    from engine_plugin import transport

    assert {name for name in transport.__all__ if getattr(transport, name, None) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = transport.nonsense
