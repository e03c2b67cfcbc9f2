"""Base of every plugin's parameter model: camelCase in files, unknown fields refused."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from sidecar.durations import EXAMPLE, parse_duration_s

MAX_TOKENS: Final = 2**31 - 1
MAX_WEIGHT: Final = 1e9  # sums of weighted scores stay finite

Weight = Annotated[float, Field(ge=0.0, le=MAX_WEIGHT, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False, strict=True)]

TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS, strict=True)]


def _seconds(value: object) -> float:
    """Durations are texts only: a bare number has no unit."""
    if not isinstance(value, str):
        raise ValueError(EXAMPLE)
    return parse_duration_s(value)


DurationS = Annotated[float, BeforeValidator(_seconds)]


class Parameters(BaseModel):
    """Parameters of one plugin type. Subclasses document each field with unit and reference default."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=False, frozen=True, strict=True
    )


class NoParameters(Parameters):
    """A plugin that takes none."""
