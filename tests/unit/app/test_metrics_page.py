"""Where engines' metrics are: flags, and the configuration that wins over them."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from epp.cli import parser
from epp.core.errors import ConfigError
from epp.endpoints.scraper import MetricsPageSettings
from epp.plugins.data_layer import MetricsDataSourceParameters
from epp.settings import metrics_page

FLAGS = ("--model-server-metrics-path", "/flag", "--refresh-metrics-interval", "2s")


def page(source: dict[str, object] | None = None, *flags: str) -> MetricsPageSettings:
    arguments = parser().parse_args(["epp", "--config-file", "x", *flags])
    given = None if source is None else MetricsDataSourceParameters.model_validate(source)
    return metrics_page(arguments, given)


def test_flags_hold_where_the_configuration_says_nothing() -> None:
    assert page(None, *FLAGS) == MetricsPageSettings("/flag", None, 2.0)
    assert page({}, *FLAGS) == MetricsPageSettings("/flag", None, 2.0)


def test_what_the_configuration_sets_wins() -> None:
    source: dict[str, object] = {"path": "/metrics", "interval": "100ms", "port": 9100}
    assert page(source, *FLAGS) == MetricsPageSettings("/metrics", None, 0.1, 9100)


def test_https_verifies_unless_told_not_to() -> None:
    verified = page({"scheme": "https"}).tls
    assert verified is not None
    assert verified.verify_mode is ssl.CERT_REQUIRED
    blind = page({"scheme": "https", "insecureSkipVerify": True}).tls
    assert blind is not None
    assert blind.verify_mode is ssl.CERT_NONE
    assert page({"scheme": "http"}, "--model-server-metrics-scheme", "https").tls is None


def test_a_path_or_a_certificate_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one such as /metrics"):
        page({"path": "metrics"})
    with pytest.raises(ConfigError, match="certificates cannot be used"):
        page({"scheme": "https", "caCertPath": str(tmp_path / "absent")})
