"""Metrics pages of real engines, of our plugin, and of servers that lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from engine_plugin import wire
from epp.core.types import EndpointMetrics, EngineInfo
from epp.endpoints.metrics_parser import (
    MAX_LABELS_BYTES,
    MAX_PAGE_LABELS_BYTES,
    MAX_REFUSED_SERIES,
    MAX_SAMPLES,
    parse_metrics,
)
from epp.plugins.metric_specs import EngineGauges, read_spec

RECORDED = Path(__file__).resolve().parents[2] / "data" / "metrics" / "vllm-0.32-excerpt.txt"

INFO_LABELS = {
    "instance": "i1",
    "rank": "0",
    "p2p_addr": "127.0.1.1:7777",
    "events_port": "5557",
    "replay_port": "5657",
    "reports_port": "5757",
    "block_size": "16",
    "hash_algo": "sha256_cbor",
    "seed_fp": "aa",
    "model_fp": "bb",
    "layout_fp": "cc",
    "protocol": "1",
}


def read(page: str, rank: int = 0) -> EndpointMetrics:
    return parse_metrics(page.encode(), scraped_at_s=12.5, rank=rank).metrics


def gauges(waiting: str, running: str = "2", usage: str = "0.5") -> str:
    return (
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}\n'
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}\n'
    )


def info_line(value: str = "1", **changes: str | None) -> str:
    labels = [f'{name}="{text}"' for name, text in (INFO_LABELS | changes).items() if text is not None]
    return f"{wire.ENGINE_INFO}{{{','.join(labels)}}} {value}\n"


def test_a_recorded_vllm_page() -> None:
    page = RECORDED.read_bytes()
    assert parse_metrics(page, scraped_at_s=3.0).metrics == EndpointMetrics(
        scraped_at_s=3.0,
        waiting_requests=0.0,
        running_requests=0.0,
        kv_usage=0.0,
        block_size_tokens=32,
        model_name="m",
        asleep=False,
        cache_tokens=174_752,
    )
    busy = page.replace(b'running{engine="0",model_name="m"} 0.0', b'running{engine="0",model_name="m"} 7.0')
    assert busy != page
    assert parse_metrics(busy, scraped_at_s=3.0).metrics.running_requests == 7.0


def test_values() -> None:
    metrics = read(gauges("3.0", "1e1", "0.25"))
    assert metrics.waiting_requests == 3.0
    assert metrics.running_requests == 10.0
    assert metrics.kv_usage == 0.25
    assert metrics.scraped_at_s == 12.5


def test_sglang_names() -> None:
    page = (
        'sglang:num_queue_reqs{model_name="m"} 4.0\nsglang:num_running_reqs{model_name="m"} 5.0\n'
        'sglang:token_usage{model_name="m"} 0.75\n'
        'sglang:cache_config_info{page_size="64",num_pages="9"} 1.0\n'
    )
    assert read(page) == EndpointMetrics(12.5, 4.0, 5.0, 0.75, 64, model_name="m", cache_tokens=576)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ('block_size="16",num_gpu_blocks="1000"', 16_000),
        ('block_size="16",num_gpu_blocks="None"', None),
        ('block_size="16",num_gpu_blocks="0"', None),
        ('block_size="16",num_gpu_blocks="9999999999"', None),
        ('block_size="x",num_gpu_blocks="10"', None),
        ('block_size="16"', None),
    ],
)
def test_what_a_cache_can_hold(config: str, tokens: int | None) -> None:
    assert read(f"vllm:cache_config_info{{{config}}} 1.0\n").cache_tokens == tokens


@pytest.mark.parametrize(
    "text", ["NaN", "nan", "+Inf", "-Inf", "inf", "-1", "-0.0", "1e999", "", "x", "1_0", "0x10", "1.2.3", "."]
)
def test_unusable_values_are_unknown(text: str) -> None:
    """S-D05: unknown, and the other values of the page still count."""
    metrics = read(gauges(text, running="2", usage=text))
    assert metrics.waiting_requests is None
    assert metrics.kv_usage is None
    assert metrics.running_requests == 2.0


def test_usage_above_one_is_unknown() -> None:
    assert read(gauges("0", usage="1.0")).kv_usage == 1.0
    assert read(gauges("0", usage="57")).kv_usage is None


@pytest.mark.parametrize(
    "page", ["", "\n", "<html>busy</html>", "# HELP vllm:num_requests_waiting x\n", "\0\xff"]
)
def test_a_page_without_our_lines_is_unknown_not_idle(page: str) -> None:
    assert read(page) == EndpointMetrics(scraped_at_s=12.5)


def test_only_whole_names_at_line_starts_count() -> None:
    page = (
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 9\n'
        ' vllm:num_requests_waiting{x="1"} 9\n'
        'other{help="vllm:num_requests_waiting 9"} 1\n'
        "# vllm:num_requests_waiting 9\n"
    )
    assert read(page).waiting_requests is None
    assert read(page + "vllm:num_requests_waiting 1").waiting_requests == 1.0
    assert read("vllm:num_requests_waiting 1\n" + page).waiting_requests == 1.0


def test_windows_line_ends_and_timestamps() -> None:
    assert read("vllm:num_requests_waiting 6 1795970137000\r\nvllm:num_requests_running 7\r\n") == (
        EndpointMetrics(12.5, 6.0, 7.0)
    )


def ranks(waiting: dict[str, str]) -> str:
    return "".join(f'vllm:num_requests_waiting{{engine="{e}"}} {v}\n' for e, v in waiting.items())


def test_series_of_several_ranks() -> None:
    page = ranks({"0": "1", "1": "5"})
    assert read(page, rank=1).waiting_requests == 5.0
    assert read(page, rank=0).waiting_requests == 1.0
    assert read(page, rank=7).waiting_requests == 6.0, "no label says which: all of them together"
    assert read(ranks({"0": "1", "1": "NaN"}), rank=7).waiting_requests is None
    assert read(ranks({"0": "1", "1": "NaN"}), rank=0).waiting_requests == 1.0


def test_engine_info() -> None:
    page = parse_metrics(info_line().encode(), scraped_at_s=1.0)
    assert page.metrics.info == EngineInfo(
        instance="i1",
        block_size_tokens=16,
        hash_algo="sha256_cbor",
        seed_fp="aa",
        model_fp="bb",
        layout_fp="cc",
        protocol="1",
        p2p_addr="127.0.1.1:7777",
    )
    assert page.metrics.block_size_tokens == 16
    assert page.info_labels == INFO_LABELS


def test_engine_info_as_the_prometheus_client_writes_it() -> None:
    registry = CollectorRegistry()
    labels = INFO_LABELS | {"instance": 'a"b\\c\nd}'}
    Gauge(wire.ENGINE_INFO, "info", list(labels), registry=registry).labels(**labels).set(1)
    refused = Counter(wire.PEER_REFUSED_TOTAL, "refused", ["peer", "reason"], registry=registry)
    refused.labels(peer="127.0.1.2:7777", reason="seed_fp").inc(3)
    page = parse_metrics(generate_latest(registry), scraped_at_s=1.0)
    assert page.info_labels == labels
    assert page.metrics.info is not None
    assert page.metrics.info.instance == 'a"b\\c\nd}'
    assert page.peer_refused == {("127.0.1.2:7777", "seed_fp"): 3.0}


@pytest.mark.parametrize(
    "missing", ["instance", "block_size", "hash_algo", "seed_fp", "layout_fp", "protocol"]
)
def test_incomplete_engine_info_is_unverified(missing: str) -> None:
    assert read(info_line(**{missing: None})).info is None
    assert read(info_line(**{missing: ""})).info is None


@pytest.mark.parametrize("size", ["0", "-16", "16.0", "x", "99999999", "٣"])
def test_impossible_block_sizes(size: str) -> None:
    assert read(info_line(block_size=size)).info is None
    assert read(f'vllm:cache_config_info{{block_size="{size}"}} 1\n').block_size_tokens is None


def test_an_info_that_is_switched_off_or_ambiguous_says_nothing() -> None:
    assert read(info_line("0")).info is None
    two = info_line() + info_line(instance="i2", rank="1")
    second = read(two, rank=1).info
    assert second is not None
    assert second.instance == "i2"
    assert read(two, rank=3).info is None
    assert read(info_line() + info_line(instance="i2")).info is None


def test_refusals_are_bounded() -> None:
    lines = "".join(
        f'{wire.PEER_REFUSED_TOTAL}{{peer="p{i}",reason="seed_fp"}} {i}\n'
        for i in range(MAX_REFUSED_SERIES * 2)
    )
    refused = parse_metrics(lines.encode(), scraped_at_s=0.0).peer_refused
    assert len(refused) == MAX_REFUSED_SERIES
    assert refused["p7", "seed_fp"] == 7.0


def test_endless_labels_are_not_read() -> None:
    page = f'vllm:num_requests_waiting{{{"a" * 3_000_000}="x"}} 1\n' + "vllm:num_requests_running 2\n"
    assert read(page) == EndpointMetrics(12.5, None, 2.0)


PAGE_BYTES = 4 << 20  # the scraper's limit
REFUSED = wire.PEER_REFUSED_TOTAL
WAITING = "vllm:num_requests_waiting"


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "line",
    [
        f"{REFUSED}{{{'a' * PAGE_BYTES}}} 1\n",
        f"{REFUSED}{{{'a' * 2000}}} 1\n",
        f"{WAITING}{{{'a' * 2000}}} 1\n",
        f"{REFUSED}{{{'a' * 2000}=}} 1\n",
        f'{REFUSED}{{a="{chr(92) * 2000}}} 1\n',
        f"{wire.ENGINE_INFO}{{{'a=,' * 500}}} 1\n",
        f"{WAITING}{{{'} ' * 1000}\n",
        f"{WAITING}{{{' ' * 2000}\n",
        f"{WAITING}{' ' * 2000}\n",
        f"{WAITING}{{\n",
        f"{WAITING[:-1]}\n",
    ],
    ids=lambda line: f"{line[:60]}..." if len(line) > 60 else line,
)
def test_a_hostile_page_of_full_size_is_cheap_and_says_nothing(line: str) -> None:
    page = line * (PAGE_BYTES // len(line) or 1)
    result = parse_metrics(page.encode(), scraped_at_s=12.5)
    assert result.metrics.waiting_requests is None
    assert result.metrics.info is None
    assert result.peer_refused == {}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("labels", ["", '{engine="1"}', '{a="",b="",c="",d=""}'])
def test_more_samples_than_a_page_may_have_are_no_sum(labels: str) -> None:
    line = f"{WAITING}{labels} 1\n"
    assert read(line * (PAGE_BYTES // len(line))).waiting_requests is None
    assert read(line * MAX_SAMPLES).waiting_requests == MAX_SAMPLES
    assert read(line * (MAX_SAMPLES + 1)).waiting_requests is None
    assert read(f'{WAITING}{{engine="7"}} 3\n' + line * MAX_SAMPLES, rank=7).waiting_requests == 3.0


def test_labels_are_read_up_to_their_limits() -> None:
    fill = MAX_LABELS_BYTES - len('engine="0",x=""')
    fits, over = (f'{WAITING}{{engine="0",x="{"y" * n}"}} 4\n' for n in (fill, fill + 1))
    other = f'{WAITING}{{engine="1"}} 5\n'
    assert read(fits + other).waiting_requests == 4.0
    assert read(over + other, rank=1).waiting_requests == 5.0
    assert read(over + other, rank=2).waiting_requests is None, "one of them is not known"
    many = MAX_PAGE_LABELS_BYTES // MAX_LABELS_BYTES
    assert read(fits * many, rank=2).waiting_requests == 4.0 * many
    assert read(fits * (many + 1), rank=2).waiting_requests is None


@pytest.mark.parametrize(
    "block",
    ["rank", 'x="1" rank="0"', "x='1'", 'x="1",,y="2"', '="1"', '0x="1"', 'x="1', 'x="\\"', "x=1", 'x="1"}{'],
)
def test_a_malformed_block_is_not_believed(block: str) -> None:
    labels = ",".join(f'{name}="{text}"' for name, text in INFO_LABELS.items())
    assert read(f"{wire.ENGINE_INFO}{{{labels}}} 1\n").info is not None
    assert read(f"{wire.ENGINE_INFO}{{{labels},{block}}} 1\n").info is None
    assert read(f"{wire.ENGINE_INFO}{{{block},{labels}}} 1\n").info is None


def test_blanks_and_a_last_comma_are_allowed() -> None:
    labels = " , ".join(f'{name} = "{text}"' for name, text in INFO_LABELS.items())
    assert parse_metrics(f"{wire.ENGINE_INFO}{{ {labels}, }} 1\n".encode(), scraped_at_s=0.0).info_labels == (
        INFO_LABELS
    )


PIECES = st.sampled_from(
    [
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        wire.ENGINE_INFO,
        wire.PEER_REFUSED_TOTAL,
        "{",
        "}",
        '"',
        "\\",
        'engine="0"',
        'block_size="16"',
        'peer="p",reason="r"',
        " ",
        ",",
        "\n",
        "\r\n",
        "1",
        "-1",
        "NaN",
        "Inf",
        "1e400",
    ]
)


@given(st.lists(PIECES | st.text(max_size=4), max_size=40).map("".join), st.integers(0, 3))
def test_any_text_parses_to_sound_values(page: str, rank: int) -> None:
    check(page.encode("utf-8", "surrogatepass"), rank)


@given(st.binary(max_size=200))
def test_any_bytes_parse(page: bytes) -> None:
    check(page, 0)


@given(st.integers(0, 700))
def test_a_cut_page_never_invents(cut: int) -> None:
    """A page that ends early: every value is the true one or unknown (or its own leading digits)."""
    page = (gauges("3", "4", "0.5") + info_line()).encode()
    assert len(page) < 700
    metrics = parse_metrics(page[:cut], scraped_at_s=0.0).metrics
    assert metrics.waiting_requests in (None, 3.0)
    assert metrics.running_requests in (None, 4.0)
    assert metrics.kv_usage in (None, 0.0, 0.5)
    assert metrics.block_size_tokens in (None, 16)


def check(page: bytes, rank: int) -> None:
    result = parse_metrics(page, scraped_at_s=1.0, rank=rank)
    for value in (result.metrics.waiting_requests, result.metrics.running_requests):
        assert value is None or 0.0 <= value < float("inf")
    assert result.metrics.kv_usage is None or 0.0 <= result.metrics.kv_usage <= 1.0
    assert result.metrics.block_size_tokens is None or result.metrics.block_size_tokens > 0


@pytest.mark.parametrize(
    ("page", "name"),
    [
        (gauges("1"), "m"),
        ('vllm:num_requests_running{engine="0"} 1\n', None),
        ('vllm:num_requests_running{engine="0",model_name=""} 1\n', None),
        ('vllm:num_requests_waiting{model_name="only-waiting"} 1\n', "only-waiting"),
        ('sglang:num_running_reqs{model_name="org/model"} 1\n', "org/model"),
        (
            'vllm:num_requests_running{model_name="a"} 1\nvllm:num_requests_running{model_name="b"} 1\n',
            None,
        ),
        (
            'vllm:num_requests_running{engine="1",model_name="b"} 1\n'
            'vllm:num_requests_running{engine="0",model_name="a"} 1\n',
            "a",
        ),
        ("", None),
    ],
)
def test_the_base_model_is_read_from_the_gauges(page: str, name: str | None) -> None:
    assert read(page).model_name == name


def sleep_state(awake: str, offloaded: str, discarded: str, engine: int = 0) -> str:
    states = {"awake": awake, "weights_offloaded": offloaded, "discard_all": discarded}
    name = "vllm:engine_sleep_state"
    return "".join(f'{name}{{engine="{engine}",sleep_state="{s}"}} {v}\n' for s, v in states.items())


@pytest.mark.parametrize(
    ("page", "asleep"),
    [
        (sleep_state("1.0", "0.0", "0.0"), False),
        (sleep_state("0.0", "1.0", "0.0"), True),
        (sleep_state("0.0", "0.0", "1.0"), True),
        (sleep_state("0.0", "0.0", "0.0"), True),
        (sleep_state("NaN", "NaN", "NaN"), None),
        ("", None),
        ('vllm:engine_sleep_state{sleep_state="awake"} 0.0\n', True),
        ("vllm:engine_sleep_state 1\n", None),
    ],
)
def test_a_sleeping_engine_says_so(page: str, asleep: bool | None) -> None:
    """S-C06."""
    assert read(page).asleep is asleep


def test_each_rank_sleeps_on_its_own() -> None:
    page = sleep_state("1.0", "0.0", "0.0", engine=0) + sleep_state("0.0", "1.0", "0.0", engine=1)
    assert (read(page, rank=0).asleep, read(page, rank=1).asleep) == (False, True)


TRITON = EngineGauges(
    waiting=(read_spec("nv_trt_llm_request_metrics{request_type=waiting}"),),
    running=(read_spec('nv_trt_llm_request_metrics{request_type="scheduled"}'),),
    kv_usage=(read_spec("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}"), read_spec("kv")),
)


def test_names_of_another_engine_are_told_apart_by_their_labels() -> None:
    page = (
        'nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 4\n'
        'nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 6\n'
        'nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.25\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 9000\n'
    )
    found = parse_metrics(page.encode(), scraped_at_s=12.5, more=TRITON).metrics
    assert (found.waiting_requests, found.running_requests, found.kv_usage) == (4.0, 6.0, 0.25)
    assert read(page).waiting_requests is None


def test_configured_names_win_and_the_usual_ones_still_count() -> None:
    page = gauges("2", running="3", usage="0.5") + "kv 0.75\n"
    found = parse_metrics(page.encode(), scraped_at_s=12.5, more=TRITON).metrics
    assert (found.waiting_requests, found.running_requests, found.kv_usage) == (2.0, 3.0, 0.75)


@pytest.mark.parametrize("text", ["", "{a=b}", "a{b}", "a{b=c", "a b", 'a{b="c}', "9a", "a{b=c,}"])
def test_specs_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(ValueError, match="expected a metric"):
        read_spec(text)
