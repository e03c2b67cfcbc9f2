"""What the picker's image must do without: the `epp` extra has neither numpy nor NIXL."""

from __future__ import annotations

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


def test_what_needs_numpy_is_there_when_it_is_asked_for() -> None:
    from engine_plugin import transport

    assert {name for name in transport.__all__ if getattr(transport, name, None) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = transport.nonsense
