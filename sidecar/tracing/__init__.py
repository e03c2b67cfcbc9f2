"""Spans of picker and sidecar: W3C trace context in and out, OTLP over HTTP to a collector.

`spans` ids, sampling, spans (pure), `otlp` their JSON, `settings` the standard OTEL_* variables, `exporter`
the one that sends. Written here and not taken from a library: what generates the picker's gateway messages
installs modules that the OpenTelemetry packages install too, and a span has to cost a few microseconds.
"""
