"""Base of every plugin's parameter model: camelCase in files, unknown fields refused."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
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

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?")
_QUANTITY_UNIT = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_QUANTITY_UNIT |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _quantity(value: object) -> object:
    """A whole number, or a quantity as Kubernetes writes it: `5000`, `5k`, `1Gi`."""
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError("expected a quantity such as 5000, 5k or 1Gi")
    return int(float(match[1]) * _QUANTITY_UNIT[match[2] or ""])


Quantity = Annotated[int, BeforeValidator(_quantity), Field(ge=0, le=2**53, strict=True)]

_HEADER_NAME = r"^[!#$%&'*+.^_`|~0-9a-zA-Z-]{1,128}$"  # RFC 9110, token
HeaderName = Annotated[str, Field(pattern=_HEADER_NAME), AfterValidator(str.lower)]


class Parameters(BaseModel):
    """Parameters of one plugin type. Subclasses document each field with unit and reference default."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=False, frozen=True, strict=True
    )


class NoParameters(Parameters):
    """A plugin that takes none."""
