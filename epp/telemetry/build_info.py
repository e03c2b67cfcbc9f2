"""Which build runs: constants of a process, as gauges that are 1."""

from __future__ import annotations

from importlib import metadata

from prometheus_client import CollectorRegistry, Gauge


def expose_build(registry: CollectorRegistry, index: str) -> None:
    """The reference's name and labels for the version (a wheel knows no commit), and the index in use."""
    info = Gauge("llm_d_epp_info", "1: the version that runs.", ["commit", "build_ref"], registry=registry)
    info.labels("", _version()).set(1)
    implementation = Gauge(
        "kvpull_epp_index_info", "1: the index in use.", ["implementation"], registry=registry
    )
    implementation.labels(index).set(1)


def _version() -> str:
    try:
        return metadata.version("kvpull")
    except metadata.PackageNotFoundError:  # run from its sources
        return "source"
