"""S-C11: which model names are the base model's, and what every other name stands for."""

from __future__ import annotations

from engine_plugin.identity import EndpointId
from epp.core.model_names import MAX_NAME_CHARS, ModelNames

A, B = EndpointId("a"), EndpointId("b")


def test_reported_and_configured_names_are_the_base_models() -> None:
    names = ModelNames(["alias"])
    names.report(A, "org/base")
    for name in ("org/base", "alias", ""):
        assert names.is_base(name)
        assert names.lora_name(name) is None
    assert names.lora_name("sql-adapter") == "sql-adapter"


def test_a_name_goes_with_its_last_endpoint() -> None:
    names = ModelNames()
    names.report(A, "m")
    names.report(B, "m")
    names.report(B, "m")
    names.forget(A)
    names.forget(A)
    assert names.is_base("m")
    names.report(B, "n")
    assert (names.is_base("m"), names.is_base("n")) == (False, True)
    names.report(B, None)
    assert not names.is_base("n")


def test_what_an_engine_may_say_is_bounded() -> None:
    names = ModelNames()
    names.report(A, "x" * (MAX_NAME_CHARS + 1))
    assert not names.is_base("x" * (MAX_NAME_CHARS + 1))
    names.report(A, "")
    assert names.is_base("")
