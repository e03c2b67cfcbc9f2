"""What the picker's metrics port may not be started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.cli import parser
from epp.core.errors import ConfigError
from epp.settings import metrics_tls
from sidecar import certificates


def asked(*flags: str) -> object:
    return metrics_tls(parser().parse_args(["epp", "--config-file", "x", *flags]))


def test_it_is_plain_unless_asked() -> None:
    assert asked() is None


def test_what_cannot_be_used_stops_the_start_and_is_named(tmp_path: Path) -> None:
    directory, authority = ("--metrics-cert-dir", str(tmp_path)), ("--metrics-client-ca-file", "/no/ca.crt")
    with pytest.raises(ConfigError, match="--metrics-client-ca-file needs --metrics-cert-dir"):
        asked(*authority)
    with pytest.raises(ConfigError, match=r"--metrics-cert-dir: .*tls\.crt: No such file"):
        asked(*directory)
    pair = certificates.self_signed()
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    assert asked(*directory) is not None
    with pytest.raises(ConfigError, match=r"--metrics-client-ca-file: /no/ca\.crt: No such file"):
        asked(*directory, *authority)
