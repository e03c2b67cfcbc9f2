"""Prometheus text as the fleet's parts write it."""

from __future__ import annotations

import pytest

from deploy.local.handles import EngineCounters, SurfaceError

_PAGE = """\
# HELP kvpull_pull_received_bytes_total Bytes
# TYPE kvpull_pull_received_bytes_total counter
kvpull_pull_received_bytes_total{peer="a"} 100.0
kvpull_pull_received_bytes_total{peer="b"} 28
kvpull_pull_served_bytes_total{peer="a"} 1.6777216e+07
kvpull_peer_refused_total{peer="a",reason="seed_fp"} 2.0
vllm:num_requests_waiting{model_name="m, {x}"} 3.0
vllm:num_requests_running 4
vllm:kv_cache_usage_perc NaN
"""


def test_counters_are_summed_over_peers_and_read_with_any_labels() -> None:
    counters = EngineCounters.from_page(_PAGE)
    assert counters.received_bytes == 128
    assert counters.served_bytes == 16_777_216
    assert (counters.waiting, counters.running) == (3, 4)
    assert counters.refused == {("a", "seed_fp"): 2}


def test_a_page_of_something_else_is_an_error_that_says_so() -> None:
    with pytest.raises(SurfaceError, match=r"/metrics page"):
        EngineCounters.from_page("<html>not metrics</html>")
