"""Base of every plugin's parameter model: camelCase in files, unknown fields refused."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_TOKENS: Final = 2**31 - 1
MAX_WEIGHT: Final = 1e9  # sums of weighted scores stay finite

Weight = Annotated[float, Field(ge=0.0, le=MAX_WEIGHT, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False, strict=True)]


def seconds_of(duration: str) -> float:
    """Seconds of a duration such as `500ms`, `5s` or `1m`. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m)", duration)
    if match is None or float(match[1]) == 0.0:
        raise ValueError("expected a duration above zero such as 500ms, 5s or 1m")
    return float(match[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[match[2]]


def _checked(duration: str) -> str:
    seconds_of(duration)
    return duration


Duration = Annotated[str, AfterValidator(_checked)]  # as Go writes them
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS, strict=True)]


class Parameters(BaseModel):
    """Parameters of one plugin type. Subclasses document each field with unit and reference default."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=False, frozen=True, strict=True
    )


class NoParameters(Parameters):
    """A plugin that takes none."""
