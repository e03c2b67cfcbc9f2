"""docs/plugins.md lists what the registry has: types, parameters, defaults, refused types."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from epp.config import parse_config
from epp.config.document import API_VERSIONS
from epp.config.gates import DEFAULTS
from epp.config.loading import _READ_ONCE
from epp.plugins.registry import DEFAULT_PRODUCERS, NOT_SUPPORTED, PLUGIN_TYPES, PluginType

PAGE = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text()
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| (.*?) \| (.*?) \|", re.MULTILINE)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def parameters_cell(row: PluginType) -> str:
    """As the page has it: `name` default, ...; no default where one has to be given or it is a section."""
    cells = []
    for name, field in row.parameters.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if default is PydanticUndefined:
            shown = " (required)"
        elif default is None or isinstance(default, BaseModel) or default in ([], {}):
            shown = ""
        else:
            shown = " " + (json.dumps(default) if not isinstance(default, str) else default)
        ignored = " (ignored)" if name in row.ignored else ""
        cells.append(f"`{field.alias or name}`{shown}{ignored}")
    return ", ".join(cells) or "-"


def test_every_type_is_listed_with_its_kind_and_parameters() -> None:
    listed = {name: (kind, parameters) for name, kind, parameters in ROW.findall(section("Types"))}
    wanted = {name: (row.kind.value, parameters_cell(row)) for name, row in PLUGIN_TYPES.items()}
    assert listed == wanted


def test_every_refused_type_is_listed_with_what_to_use() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*?) \|$", section("Not part of kvpull"), re.MULTILINE)
    assert dict(rows) == dict(NOT_SUPPORTED)


def test_versions_gates_defaults_and_what_is_read_once() -> None:
    for text in (*API_VERSIONS, *DEFAULTS, *DEFAULT_PRODUCERS.values(), *_READ_ONCE):
        assert f"`{text}`" in PAGE


def test_the_example_is_a_good_document() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = parse_config(example)
    assert config.precise is not None
    assert config.flow is None
