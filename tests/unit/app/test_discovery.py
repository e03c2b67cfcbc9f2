"""Where endpoints and thresholds come from: which flag wins, and what cannot be meant."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epp import cli
from epp.core.errors import ConfigError
from epp.discovery import EndpointCallbacks, Inputs, build_inputs
from epp.endpoints.file_source import FileSource
from epp.endpoints.pool_source import PoolSource
from sidecar.pool_watch.access import Environment

NOWHERE = Environment({}, Path("/nonexistent"))


def build(*argv: str, discovery_path: str | None = None) -> Inputs:
    arguments = cli.parser().parse_args(["epp", "--config-file", "c.yaml", *argv])
    config: Any = SimpleNamespace(discovery_path=discovery_path)
    callbacks = EndpointCallbacks(lambda row, draining: None, lambda endpoint: None)
    return build_inputs(arguments, config, callbacks, lambda thresholds: None, NOWHERE)


@pytest.mark.parametrize(
    "argv",
    [
        ("--pool-name", "llama"),
        ("--endpoint-selector", "app=llama", "--endpoint-target-ports", "8000,8001"),
    ],
)
def test_a_pool_or_a_selector_is_watched(argv: tuple[str, ...]) -> None:
    inputs = build(*argv)
    assert isinstance(inputs.endpoints, PoolSource)
    assert inputs.access is not None
    assert not inputs.ready()


@pytest.mark.parametrize("path", [None, "from-config.yaml"])
def test_a_file_wins_and_needs_no_api_server(path: str | None, caplog: pytest.LogCaptureFixture) -> None:
    flags = () if path else ("--endpoints-file", "f.yaml")
    inputs = build(*flags, "--pool-name", "llama", discovery_path=path)
    assert isinstance(inputs.endpoints, FileSource)
    assert inputs.access is None
    assert "the pool and the selector are not watched" in caplog.text


def test_thresholds_may_be_watched_beside_a_file_of_endpoints() -> None:
    inputs = build("--endpoints-file", "f.yaml", "--thresholds-configmap", "a", "--thresholds-configmap", "b")
    assert inputs.access is not None
    assert [status.what for status in inputs.watches] == [
        "configmaps in default (metadata.name=a)",
        "configmaps in default (metadata.name=b)",
    ]


def test_thresholds_by_label_in_the_pools_namespace() -> None:
    flags = ("--pool-name", "llama", "--pool-namespace", "llm", "--thresholds-selector", "b=2,a=1")
    assert [w.what for w in build(*flags).watches if w.resource == "configmaps"] == [
        "configmaps in llm (a=1,b=2)"
    ]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ((), "no endpoints: give --pool-name"),
        (("--endpoint-selector", "app=llama"), "--endpoint-selector: --endpoint-target-ports has 0 entries"),
        (
            ("--endpoint-selector", "a=b", "--endpoint-target-ports", "80,80"),
            "--endpoint-target-ports: a number",
        ),
    ],
)
def test_what_cannot_be_meant_is_said(argv: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(*argv)


async def test_no_api_server_is_a_sentence_at_start() -> None:
    with pytest.raises(ConfigError, match="no API server: this is not a pod"):
        await build("--pool-name", "llama").open()


@pytest.mark.parametrize("text", ["", "a", "a=b,c", "=b", "a=", "a=b c=d", "a in (b)", "a!=b"])
def test_labels_that_are_no_equality_terms_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        cli.labels(text)


def test_labels_and_ports() -> None:
    assert cli.labels("llm-d.ai/role=decode, app=llama") == {"llm-d.ai/role": "decode", "app": "llama"}
    assert cli.ports("8000, 8001") == [8000, 8001]
    with pytest.raises(argparse.ArgumentTypeError):
        cli.ports("8000,0")
