"""What the doctor reads from pages and from the machine it runs on."""

from __future__ import annotations

from pathlib import Path

from epp.ops.doctor.gather import gather_shm
from epp.ops.doctor.pages import EXTERNAL_HITS, Page, drops_of, info_of, messages_of, rise

_PAGE = """\
kvpull_engine_info{rank="0",seed_fp="a"} 1
kvpull_engine_info{rank="1",seed_fp="b"} 1
vllm:external_prefix_cache_hits_total{engine="0"} 3
vllm:external_prefix_cache_hits_total{engine="1"} 4
kvpull_sidecar_routing_headers_dropped_total{header="x",reason="unsigned"} 2
kvpull_sidecar_routing_headers_dropped_total{header="y",reason="unsigned"} 1
kvpull_sidecar_pulls_skipped_total{reason="no_body"} 5
kvpull_epp_kv_event_messages_total{endpoint="a/0",outcome="live"} 7
"""


def test_a_page() -> None:
    page = Page(_PAGE)
    assert page.whole
    assert info_of(page, "1") == {"rank": "1", "seed_fp": "b"}
    assert info_of(Page(""), "1") is None
    assert page.total(EXTERNAL_HITS) == 7
    assert page.total("absent") is None
    assert drops_of(page) == {"unsigned": 3, "no_body": 5}
    assert messages_of(page) == {"a/0": {"live": 7}}


def test_a_broken_page_counts_as_far_as_it_goes() -> None:
    page = Page("a_total 1\nb_total{x=\n")
    assert not page.whole
    assert page.total("a_total") == 1


def test_rise() -> None:
    assert rise({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 3.0, "c": 4.0}) == {"b": 1.0, "c": 4.0}


def test_a_left_over_tier_file_is_one_that_no_process_has_mapped(tmp_path: Path) -> None:
    shm, proc = tmp_path / "shm", tmp_path / "proc"
    for directory in (shm, proc / "1", proc / "self", proc / "2"):
        directory.mkdir(parents=True)
    for name in ("vllm_offload_used.mmap", "vllm_offload_left.mmap", "other"):
        (shm / name).touch()
    (proc / "1" / "maps").write_text("7f00-7f01 rw-s /dev/shm/vllm_offload_used.mmap\n")
    found = gather_shm(shm, proc)
    assert found is not None
    assert found.stale == ("vllm_offload_left.mmap",)
    assert found.size_bytes >= found.free_bytes > 0
    assert gather_shm(tmp_path / "absent", proc) is None
