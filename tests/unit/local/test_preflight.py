"""Each obstacle is one sentence that names it and a way out."""

from __future__ import annotations

from pathlib import Path

from deploy.local import preflight
from deploy.local.__main__ import python_problem
from deploy.local.preflight import MemoryPlan

_MIB = 1 << 20


def test_missing_packages_are_named() -> None:
    sentence = preflight.module_problem(["json", "no_such_package"])
    assert sentence is not None
    assert "no_such_package" in sentence
    assert "json" not in sentence
    assert preflight.module_problem() is None


def test_old_python_is_named() -> None:
    sentence = python_problem((3, 9, 2))
    assert sentence is not None
    assert "3.9" in sentence
    assert "3.11" in sentence
    assert python_problem((3, 11, 0)) is None
    assert python_problem((3, 12, 1)) is None


def test_too_little_memory_says_how_much_is_there(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4096000 kB\nMemAvailable:  1024000 kB\n")
    plan = MemoryPlan(total_bytes=2000 * _MIB, shm_bytes=0)
    (sentence,) = preflight.check_memory(plan, meminfo, tmp_path)
    assert "2000 MiB" in sentence
    assert "1000 MiB" in sentence
    assert "--cpu-tier-tokens" in sentence
    small = MemoryPlan(total_bytes=999 * _MIB, shm_bytes=0)
    assert list(preflight.check_memory(small, meminfo, tmp_path)) == []


def test_small_shared_memory_is_named(tmp_path: Path) -> None:
    plan = MemoryPlan(total_bytes=0, shm_bytes=1 << 60)
    (sentence,) = preflight.check_memory(plan, tmp_path / "absent", tmp_path)
    assert str(tmp_path) in sentence
    assert "--shm-size" in sentence


def test_unusable_shared_memory_is_named(tmp_path: Path) -> None:
    plan = MemoryPlan(total_bytes=0, shm_bytes=0)
    (sentence,) = preflight.check_memory(plan, tmp_path / "absent", tmp_path / "nowhere")
    assert "nowhere" in sentence


def test_port_beyond_the_range_is_a_sentence() -> None:
    (sentence,) = preflight.check_listeners([("gateway", "127.0.0.1", 70_000)])
    assert "70000" in sentence
    assert "--port-offset" in sentence
