"""subPath mounts are recognised in the kernel's list of mounts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from epp.thresholds.mounts import frozen_mount, parse_mountinfo, read_mounts

VOLUME = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~configmap/thresholds"
OPTIONS = "ro,relatime - ext4 /dev/vda1 rw"


def line(root: str, point: str) -> str:
    return f"1405 1391 254:1 {root} {point} {OPTIONS}\n"


def test_mountinfo_as_the_kernel_writes_it() -> None:
    text = line("/", "/") + line(VOLUME, r"/etc/with\040space") + "garbage\n"
    assert parse_mountinfo(text) == {"/": "/", "/etc/with space": VOLUME}
    assert parse_mountinfo(line("/a", "/x") + line("/b", "/x"))["/x"] == "/b"


def test_a_whole_volume_and_a_plain_folder_are_fine(tmp_path: Path) -> None:
    assert frozen_mount(tmp_path, [tmp_path / "t.yaml"], {"/": "/"}) is None
    (tmp_path / "..v1").mkdir()
    (tmp_path / "..data").symlink_to("..v1")
    assert frozen_mount(tmp_path, [tmp_path / "t.yaml"], {str(tmp_path): VOLUME}) is None
    assert frozen_mount(tmp_path, [], {str(tmp_path): "/srv/thresholds"}) is None, (
        "a host path is no kubelet volume"
    )


@pytest.mark.parametrize(
    "root",
    [
        f"{VOLUME}/..2026_01_02_03_04_05.1",
        "/var/lib/kubelet/pods/uid/volume-subpaths/thresholds/epp/0",
        VOLUME,  # no ..data in it
        "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~projected/all",
    ],
)
def test_a_directory_from_inside_a_volume_is_refused(tmp_path: Path, root: str) -> None:
    said = frozen_mount(tmp_path, [], {str(tmp_path): root})
    assert said is not None
    assert str(tmp_path) in said
    assert "without subPath" in said


def test_a_file_that_is_a_mount_is_refused(tmp_path: Path) -> None:
    said = frozen_mount(tmp_path, [tmp_path / "t.yaml"], {str(tmp_path / "t.yaml"): f"{VOLUME}/..v1/t.yaml"})
    assert said is not None
    assert said.startswith(f"{tmp_path}/t.yaml is a mount of its own")


def test_no_proc_is_no_mounts(tmp_path: Path) -> None:
    assert read_mounts(tmp_path / "absent") == {}


def test_a_real_bind_mount_of_a_file(tmp_path: Path) -> None:
    """What a kubelet's subPath comes to: one file bound over another, in a mount namespace of its own."""
    probe = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*probe, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no unprivileged mount namespaces here")
    (tmp_path / "volume").write_text("")
    (tmp_path / "t.yaml").write_text("")
    (tmp_path / "u.yaml").write_text("")
    script = (
        "import sys; from pathlib import Path; from epp.thresholds.mounts import frozen_mount, read_mounts; "
        "d = Path(sys.argv[1]); print(frozen_mount(d, [d / 'u.yaml'], read_mounts())); "
        "print(frozen_mount(d, [d / 't.yaml'], read_mounts()))"
    )
    bind = f'mount --bind "{tmp_path}/volume" "{tmp_path}/t.yaml"'
    command = f'{bind} && exec "{sys.executable}" -c "$0" "{tmp_path}"'
    done = subprocess.run([*probe, "sh", "-c", command, script], capture_output=True, text=True, check=True)
    other, frozen = done.stdout.splitlines()
    assert other == "None"
    assert frozen.startswith(f"{tmp_path}/t.yaml is a mount of its own (subPath)")
