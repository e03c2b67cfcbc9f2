"""Emulated engines and an API server for tests of the picker's process."""

from __future__ import annotations

from tests.integration.engine.conftest import loopback_nixl, start_engine
from tests.integration.kube.conftest import helm, kube, kubectl, kubectl_binary

__all__ = ["helm", "kube", "kubectl", "kubectl_binary", "loopback_nixl", "start_engine"]
