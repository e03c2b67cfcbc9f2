"""The files that a fleet generates for its parts: endpoints, thresholds, secrets, Envoy's bootstrap.

All are written by rename, so that a watching part never reads half of one. Secrets are new at every
start, readable by the owner only, and gone with the directory when the fleet stops.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deploy.local.errors import FleetError
from deploy.local.spec import ROLE_BOTH, EngineSpec

_ROLE_LABEL = "llm-d.ai/role"
_SECRET_BYTES = 32


class DirectoryInUse(FleetError):
    """Another fleet uses the same directory; the message says what to do."""


class RunFiles:
    """Owner of one run directory. Its parent is locked against a second fleet; what a killed fleet
    left in the directory is removed first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_fd)
            raise DirectoryInUse(
                f"Another fleet uses {directory.parent}: stop it, or choose another directory with --out."
            ) from error
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        self.thresholds_dir.mkdir()
        self.debug_token = secrets.token_hex(_SECRET_BYTES)
        self._secret(self.debug_token_file, self.debug_token)
        self._secret(self.peer_key_file, secrets.token_hex(_SECRET_BYTES))
        self._secret(self.routing_key_file, secrets.token_hex(_SECRET_BYTES))

    @property
    def endpoints_file(self) -> Path:
        return self._directory / "endpoints.yaml"

    @property
    def thresholds_dir(self) -> Path:
        return self._directory / "thresholds"

    @property
    def debug_token_file(self) -> Path:
        return self._directory / "debug-token"

    @property
    def peer_key_file(self) -> Path:
        return self._directory / "peer-key"

    @property
    def routing_key_file(self) -> Path:
        return self._directory / "routing-key"

    @property
    def bootstrap_file(self) -> Path:
        return self._directory / "envoy.json"

    def write_endpoints(self, engines: Iterable[EngineSpec], roles: Mapping[str, str]) -> None:
        """The static endpoint file; a pod without a role is `both`."""
        rows = [_endpoint_row(engine, roles.get(engine.pod, ROLE_BOTH)) for engine in engines]
        self._replace(self.endpoints_file, json.dumps({"endpoints": rows}, indent=2))

    def write_thresholds(self, *, enabled: bool, min_cached_token_delta: int) -> None:
        document = {
            "apiVersion": "kvpull/v1alpha1",
            "kind": "PullThresholds",
            "spec": {"default": {"enabled": enabled, "minCachedTokenDelta": min_cached_token_delta}},
        }
        self._replace(self.thresholds_dir / "pull.yaml", json.dumps(document, indent=2))

    def write_bootstrap(self, document: Mapping[str, Any]) -> None:
        self._replace(self.bootstrap_file, json.dumps(document, indent=2))

    def remove(self) -> None:
        """Delete the directory and give the lock back."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock_fd)

    def _replace(self, path: Path, text: str) -> None:
        temporary = self._directory / f".{path.name}.tmp"
        temporary.write_text(text + "\n")
        temporary.replace(path)

    def _secret(self, path: Path, value: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(value)


def _endpoint_row(engine: EngineSpec, role: str) -> dict[str, Any]:
    address = engine.address
    return {
        "pod": address.pod,
        "rank": 0,
        "host": address.host,
        "serving_port": address.serving_port,
        "metrics_port": address.engine_port,
        "events_port": address.events_port,
        "replay_port": address.replay_port,
        "p2p_port": engine.listed_p2p_port or address.p2p_port,
        "labels": {_ROLE_LABEL: role},
    }
