"""One container as the chart's pod runs it: read-only root, user 65532, no capability, no new privileges.

crun is a real OCI runtime, the one below CRI-O; what is not as in a cluster is named in `_SHARED`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

USER = 65532
_SHARED = ("network",)  # of the machine, so that probes reach it over loopback; no cgroup limits either
_NAMESPACES = ("mount", "pid", "ipc", "uts")
# crun refuses cgroups of two versions side by side; it manages none here, so it is shown one of them
_ONE_CGROUP = ("unshare", "--mount", "sh", "-c", 'mount -t cgroup2 none /sys/fs/cgroup; exec "$@"', "crun")
_STATUS = {
    "Uid": f"{USER} " * 4,
    "Gid": f"{USER} " * 4,
    "Groups": "",
    "CapEff": "0" * 16,
    "CapBnd": "0" * 16,
    "NoNewPrivs": "1",
}
_WRITES = {"/opt/kvpull/x": errno.EROFS, "/x": errno.EROFS, "/tmp/x": 0}
_STOP_TIMEOUT_S = 60
_DEVICES = {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}


@dataclass(frozen=True, slots=True)
class Container:
    """A running container."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    state: Path = field(repr=False)

    def crun(self, *arguments: str) -> list[str]:
        return _crun(self.state, *arguments)

    @property
    def pid(self) -> int:
        """Of its first process, as the machine counts."""
        told = subprocess.run(self.crun("state", self.name), capture_output=True, check=True)
        return int(json.loads(told.stdout)["pid"])

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Another process in it, with the same user and rights."""
        run = self.crun("exec", self.name, *command)
        return subprocess.run(run, capture_output=True, text=True, timeout=_STOP_TIMEOUT_S, check=False)

    def said(self) -> str:
        return self.output.read_text()

    def stop(self) -> int:
        """SIGTERM as a kubelet sends it; the exit status.

        Raises:
            TimeoutExpired: it goes on after a minute.
        """
        subprocess.run(self.crun("kill", self.name, "TERM"), check=True)
        return self.process.wait(_STOP_TIMEOUT_S)


@contextmanager
def running(
    name: str, root: Path, image: Mapping[str, Any], arguments: list[str], mounts: Mapping[str, Path]
) -> Iterator[Container]:
    """The image's entry point with these arguments. `mounts`: read-only, by where they are seen."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    output, state = folder / "output", folder / "state"
    (folder / "config.json").write_text(json.dumps(configuration(root, image, arguments, mounts)))
    with output.open("wb") as file:
        command = _crun(state, "run", f"--bundle={folder}", name)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    container = Container(name, process, output, state)
    try:
        yield container
    finally:
        if process.poll() is None:
            subprocess.run(container.crun("kill", name, "KILL"), capture_output=True, check=False)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        subprocess.run(container.crun("delete", "--force", name), capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _crun(state: Path, *arguments: str) -> list[str]:
    return [*_ONE_CGROUP, "crun", "--cgroup-manager=disabled", f"--root={state}", *arguments]


def configuration(
    root: Path, image: Mapping[str, Any], arguments: list[str], mounts: Mapping[str, Path]
) -> dict[str, Any]:
    """The OCI runtime's config.json."""
    uid, _, gid = str(image.get("User", "")).partition(":")
    nothing: dict[str, list[str]] = {
        kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")
    }
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": True},
        "hostname": "kvpull",
        "process": {
            "args": [*image["Entrypoint"], *arguments],
            "env": list(image["Env"]),
            "cwd": "/",
            "user": {"uid": int(uid or 0), "gid": int(gid or 0)},
            "capabilities": nothing,
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            _DEVICES,
            _mount("/tmp", "tmpfs", "tmpfs", "nosuid", "nodev", "size=256m", "mode=1777"),
            *(_mount(where, "bind", str(path), "rbind", "ro") for where, path in mounts.items()),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in _NAMESPACES if kind not in _SHARED]},
    }


def _mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


def runtime_faults(container: Container) -> list[str]:
    """What is not as the pod's security context wants it, seen from the machine and from inside."""
    lines = Path(f"/proc/{container.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    return faults_of(status, {path: _write(container, path) for path in _WRITES})


def _write(container: Container, path: str) -> int:
    """The error number of a process of its own that opens the file; 0: none."""
    code = f"import sys\ntry: open({path!r}, 'w')\nexcept OSError as e: sys.exit(e.errno)"
    return container.execute("/opt/kvpull/bin/python", "-c", code).returncode


def faults_of(status: Mapping[str, str], errors: Mapping[str, int]) -> list[str]:
    """Sentences about a /proc status and about what came of writing to paths."""
    faults = [
        f"{key} is {' '.join(status[key].split())!r}"
        for key, wanted in _STATUS.items()
        if status[key].split() != wanted.split()
    ]
    for path, wanted in _WRITES.items():
        if errors[path] != wanted:
            faults.append(f"writing {path}: {os.strerror(errors[path]) if errors[path] else 'allowed'}")
    return faults
