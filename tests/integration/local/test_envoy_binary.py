"""The real Envoy accepts the bootstrap that the fleet gives it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from deploy.local import envoy
from deploy.local.ports import AddressPlan


def test_bootstrap_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "bootstrap.json"
    path.write_text(json.dumps(envoy.bootstrap(AddressPlan("127.0.31", 1000).control)))
    command = envoy.EnvoyCommand(envoy.find_binary(), path)
    done = subprocess.run(
        [*command.argv(), "--mode", "validate"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout
