"""The signature covers every text it names, and is believed for a minute."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

import pytest

from sidecar.routing_auth import RoutingAuth, RoutingClaims, load_routing_key, sign_routing, verify_routing

_KEY = b"0123456789abcdef"
_CLAIMS = RoutingClaims("req-1", "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")


def test_a_copied_signature_cannot_be_made_young_again() -> None:
    old = sign_routing(_KEY, _CLAIMS, now_s=1_700_000_000)
    renewed = "1700000300." + old.partition(".")[2]
    assert verify_routing(_KEY, renewed, _CLAIMS, now_s=1_700_000_300) is RoutingAuth.WRONG


def test_the_format_is_documented() -> None:
    text = b"1700000000\nreq-1\n10.0.0.1:8000\n10.0.0.2:8000\n10.0.0.3:8000"
    digest = hmac.new(_KEY, text, hashlib.sha256).hexdigest()
    assert sign_routing(_KEY, _CLAIMS, now_s=1_700_000_000.9) == f"1700000000.{digest}"


def test_what_is_signed_is_valid() -> None:
    value = sign_routing(_KEY, _CLAIMS, now_s=1000.0)
    assert verify_routing(_KEY, value, _CLAIMS, now_s=1059.0) is RoutingAuth.VALID


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RoutingClaims)])
def test_no_text_can_be_exchanged(field: str) -> None:
    value = sign_routing(_KEY, _CLAIMS, now_s=1000.0)
    changed = dataclasses.replace(_CLAIMS, **{field: "10.9.9.9:8000"})
    assert verify_routing(_KEY, value, changed, now_s=1000.0) is RoutingAuth.WRONG


def test_a_leg_is_never_valid_as_routing() -> None:
    leg = RoutingClaims.of_leg("req-1", "10.0.0.1:8000", "prefill")
    value = sign_routing(_KEY, leg, now_s=1000.0)
    plain = RoutingClaims("req-1", "10.0.0.1:8000")
    assert verify_routing(_KEY, value, plain, now_s=1000.0) is RoutingAuth.WRONG


@pytest.mark.parametrize("now_s", [1061.5, 938.0], ids=["old", "from the future"])
def test_a_stale_header_is_not_believed(now_s: float) -> None:
    value = sign_routing(_KEY, _CLAIMS, now_s=1000.0)
    assert verify_routing(_KEY, value, _CLAIMS, now_s=now_s) is RoutingAuth.STALE


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (None, RoutingAuth.MISSING),
        ("", RoutingAuth.MISSING),
        ("1000", RoutingAuth.MALFORMED),
        ("x.00", RoutingAuth.MALFORMED),
        ("-5.00", RoutingAuth.MALFORMED),
        ("9999999999999.00", RoutingAuth.MALFORMED),
        ("1000.\udce9", RoutingAuth.MALFORMED),
        ("1000.", RoutingAuth.WRONG),
        ("1000." + "0" * 64, RoutingAuth.WRONG),
    ],
)
def test_other_values(value: str | None, outcome: RoutingAuth) -> None:
    found = verify_routing(_KEY, value, _CLAIMS, now_s=1000.0)
    assert found is outcome
    assert not found.trusted


def test_key_file_content() -> None:
    assert load_routing_key(_KEY + b"\n") == _KEY
    with pytest.raises(ValueError, match="15 bytes"):
        load_routing_key(_KEY[:15] + b"\n\n")
