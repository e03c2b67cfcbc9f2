"""What the flags about replicas mean."""

from __future__ import annotations

import pytest

from epp.cli import parser
from epp.core.errors import ConfigError
from epp.leases.choice import HaMode
from epp.settings import ha_mode


def mode(*flags: str) -> HaMode:
    return ha_mode(parser().parse_args(["epp", "--config-file", "x", *flags]))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), HaMode.NONE),
        (("--ha-mode", "active-active"), HaMode.ACTIVE_ACTIVE),
        (("--ha-enable-leader-election",), HaMode.ACTIVE_PASSIVE),
        (("--ha-enable-leader-election=true", "--ha-mode", "active-passive"), HaMode.ACTIVE_PASSIVE),
        (("--ha-enable-leader-election=false", "--ha-mode", "active-active"), HaMode.ACTIVE_ACTIVE),
    ],
)
def test_modes(flags: tuple[str, ...], expected: HaMode) -> None:
    assert mode(*flags) is expected


def test_two_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match="active-passive, --ha-mode says active-active"):
        mode("--ha-enable-leader-election", "--ha-mode", "active-active")


@pytest.mark.parametrize("flags", [("--ha-mode", "both"), ("--ha-lease-name", "No_Name")])
def test_what_is_no_mode_or_name_is_wrong_usage(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        mode(*flags)
    assert flags[1] in capsys.readouterr().err
