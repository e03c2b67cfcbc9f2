"""Whatever a file says, it is understood or refused with a sentence; it never ends in a traceback."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.config import EppConfig, parse_config
from epp.core.errors import ConfigError
from epp.plugins.registry import PLUGIN_TYPES

CONFIGS = Path(__file__).parents[2] / "data" / "epp_configs"
DOCUMENTS = [yaml.safe_load(path.read_text()) for path in sorted(CONFIGS.glob("*.yaml"))]
NAMES = sorted(PLUGIN_TYPES)
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**63,
    0.5,
    1e300,
    "",
    "x",
    "5s",
    "1Gi",
    [],
    [1],
    {},
    {"a": 1},
    *NAMES,
]


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = [at] if at else []
    for key, child in children:
        found += places(child, (*at, key))
    return found


def changed(document: Any, where: tuple[Any, ...], how: int, value: Any) -> Any:
    """0: another value, 1: gone, 2: twice or one more key."""
    document = copy.deepcopy(document)
    parent = document
    for key in where[:-1]:
        parent = parent[key]
    if how == 0:
        parent[where[-1]] = value
    elif how == 1:
        del parent[where[-1]]
    elif isinstance(parent, list):
        parent.append(copy.deepcopy(parent[where[-1]]))
    else:
        parent[str(value)] = parent[where[-1]]
    return document


def understood(text: str) -> EppConfig | str:
    """The configuration, or why not."""
    try:
        return parse_config(text)
    except ConfigError as error:
        return str(error)


@settings(max_examples=150)
@given(st.data())
def test_a_mutated_configuration_is_understood_or_refused(data: st.DataObject) -> None:
    document = data.draw(st.sampled_from(DOCUMENTS))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from(places(document)))
        document = changed(document, where, data.draw(st.integers(0, 2)), data.draw(st.sampled_from(VALUES)))
    text = yaml.safe_dump(document)
    config = understood(text)
    if isinstance(config, str):
        assert config.startswith(("config: ", "plugins: "))  # and goes on with the place
        return
    assert config.explanation is not None
    config.explanation.as_json()
    again = parse_config(text, before=config)  # a reload of the same
    assert again.explanation == config.explanation
    assert {name: i.object for name, i in again.instances.items()} == {
        name: i.object for name, i in config.instances.items()
    }
