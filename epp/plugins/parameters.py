"""Base of every plugin's parameter model: camelCase in files, unknown fields refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Parameters(BaseModel):
    """Parameters of one plugin type. Subclasses document each field with unit and reference default."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=False, frozen=True, strict=True
    )


class NoParameters(Parameters):
    """A plugin that takes none."""
