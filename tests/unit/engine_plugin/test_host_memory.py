"""S-E18: a CPU tier that cannot fit is refused by need and limit; memlock matters where memory is pinned."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from engine_plugin.transport import TierMemoryError
from engine_plugin.vllm.host_memory import check_room

MIB = 1 << 20


@pytest.fixture
def limit(tmp_path: Path) -> Path:
    file = tmp_path / "memory.max"
    file.write_text("max\n")
    return file


def test_what_fits_is_silent(limit: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_room(MIB, cgroup_limit=limit, rdma=tmp_path / "none")
    limit.write_text(f"{64 * MIB}\n")
    check_room(64 * MIB, cgroup_limit=limit, rdma=tmp_path / "none")
    check_room(64 * MIB, shm=tmp_path / "gone", cgroup_limit=tmp_path / "gone", rdma=tmp_path / "none")
    assert caplog.records == []


def test_a_tier_above_the_pod_s_limit(limit: Path) -> None:
    limit.write_text(f"{64 * MIB}\n")
    with pytest.raises(TierMemoryError, match=r"needs 65 MiB and the pod's memory limit .* has 64 MiB"):
        check_room(65 * MIB, cgroup_limit=limit)


def test_a_tier_above_dev_shm(limit: Path, tmp_path: Path) -> None:
    with pytest.raises(TierMemoryError, match=rf"needs \d+ MiB and {tmp_path} has \d+ MiB"):
        check_room(1 << 60, shm=tmp_path, cgroup_limit=limit)


@pytest.mark.parametrize(("device", "said"), [(True, 1), (False, 0)])
def test_memlock_is_named_where_a_device_pins(
    device: bool,
    said: int,
    limit: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING, logger="vllm.kvpull")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    rdma = tmp_path / "infiniband"
    if device:
        rdma.mkdir()
    check_room(MIB, cgroup_limit=limit, rdma=rdma)
    assert len(caplog.records) == said
    assert caplog.text.count("memlock limit is 64 KiB") == said
