"""Rows of the registry fit the parameters they speak of."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from epp.plugins.registry import DEFAULT_PRODUCERS, PLUGIN_TYPES, Data, PluginType

ROWS = list(PLUGIN_TYPES.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.type_name)
def test_needs_and_ignored_parameters_are_parameters(row: PluginType) -> None:
    for need in row.needs:
        assert need.parameter is None or need.parameter in row.parameters.model_fields
    for path in row.ignored:
        model: type[BaseModel] = row.parameters
        for name in path.split("."):
            annotation = model.model_fields[name].annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                model = annotation


@pytest.mark.parametrize("data", Data)
def test_the_default_producer_provides_what_it_is_added_for(data: Data) -> None:
    row = PLUGIN_TYPES[DEFAULT_PRODUCERS[data]]
    assert row.provides is data
    row.parameters.model_validate({})  # it can be added without parameters
