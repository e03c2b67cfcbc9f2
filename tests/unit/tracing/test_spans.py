"""Trace context as W3C writes it, sampling, what ends a span, and the variables that say where spans go."""

from __future__ import annotations

import random

import orjson
import pytest

from sidecar.tracing.otlp import encode_spans
from sidecar.tracing.settings import TracingError, read_settings
from sidecar.tracing.spans import Span, SpanContext, Tracer, read_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_a_context_that_is_followed(text: str, sampled: bool) -> None:
    assert read_traceparent(text) == SpanContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_a_context_that_is_not(text: str | None) -> None:
    assert read_traceparent(text) is None


def tracer(ratio: float = 1.0) -> tuple[Tracer, list[Span]]:
    ended: list[Span] = []
    ticks = iter(range(1, 10_000))
    return Tracer(ended.append, ratio=ratio, rng=random.Random(1), now_ns=lambda: next(ticks)), ended


def test_a_callers_decision_is_followed_both_ways() -> None:
    for ratio in (0.0, 1.0):
        own, ended = tracer(ratio)
        sampled = own.receive(f"00-{TRACE}-{SPAN}-01", "x")
        assert isinstance(sampled, Span)
        assert (sampled.context.trace_id, sampled.parent_id) == (TRACE, SPAN)
        sampled.end()
        assert own.receive(f"00-{TRACE}-{SPAN}-00", "x") == SpanContext(TRACE, SPAN, False)
        assert ended == [sampled]


def test_traces_that_begin_here_are_sampled_by_ratio() -> None:
    own, _ = tracer(0.25)
    started = [own.receive(None, "x") for _ in range(2_000)]
    assert 400 < sum(isinstance(found, Span) for found in started) < 600
    unsampled = next(found for found in started if isinstance(found, SpanContext))
    assert read_traceparent(unsampled.traceparent) == unsampled  # the next hop decides no second time


def test_a_span_ends_once_and_its_children_know_it() -> None:
    own, ended = tracer()
    span = own.receive(None, "parent")
    assert isinstance(span, Span)
    child = span.child("child")
    child.end("status 503")
    child.end()
    span.set("a", None)
    span.set("b", "x" * 1_000)
    span.end()
    assert [found.name for found in ended] == ["child", "parent"]
    assert (child.parent_id, child.error) == (span.context.span_id, "status 503")
    assert span.attributes == {"b": "x" * 256}
    assert span.started_ns < child.started_ns < child.ended_ns < span.ended_ns


def test_the_json_of_otlp() -> None:
    own, _ = tracer()
    span = own.receive(f"00-{TRACE}-{SPAN}-01", "x")
    assert isinstance(span, Span)
    for name, value in {"text": "\ud800é", "count": 3, "share": 0.5, "on": True}.items():
        span.set(name, value)
    span.end("broken")
    (resource,) = orjson.loads(encode_spans([span], {"service.name": "s"}))["resourceSpans"]
    assert resource["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": "s"}}]
    (found,) = resource["scopeSpans"][0]["spans"]
    assert (found["traceId"], found["parentSpanId"], found["kind"]) == (TRACE, SPAN, 2)
    assert found["status"] == {"code": 2, "message": "broken"}
    assert (found["startTimeUnixNano"], found["endTimeUnixNano"]) == ("1", "2")
    assert {a["key"]: a["value"] for a in found["attributes"]} == {
        "text": {"stringValue": "?é"},
        "count": {"intValue": "3"},
        "share": {"doubleValue": 0.5},
        "on": {"boolValue": True},
    }


def test_variables() -> None:
    found = read_settings({}, "s")
    assert (found.url, found.ratio, found.resource) == (
        "http://localhost:4318/v1/traces",
        1.0,
        {"service.name": "s"},
    )
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4318/",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20secret, x=y",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=p,service.name=other",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
    }
    found = read_settings(env, "s")
    assert (found.url, found.ratio) == ("https://collector:4318/v1/traces", 0.1)
    assert found.resource == {"service.name": "mine", "k8s.pod.name": "p"}
    assert found.headers == {"authorization": "Bearer secret", "x": "y"}
    assert "secret" not in repr(found)
    exact = read_settings({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x"}, "s")
    assert exact.url == "http://c/x"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "no-pair"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_named(name: str, value: str) -> None:
    with pytest.raises(TracingError, match=name):
        read_settings({name: value}, "s")


@pytest.mark.parametrize("value", ["2", "-0.1", "nan", "often"])
def test_a_ratio_that_is_none(value: str) -> None:
    env = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": value}
    with pytest.raises(TracingError, match="OTEL_TRACES_SAMPLER_ARG"):
        read_settings(env, "s")
