"""Tools of Anthropic /v1/messages: those that are in force at the end of the conversation.

Semantics: vLLM 0.32 `entrypoints/anthropic` (`_resolve_tools`). System messages inside the conversation may
add and take away tools; a template is shown one list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from epp.request.prompts import NoPrompt, Reason
from epp.request.shapes.fields import function_tool, read_dict, read_list, read_text

_Tool = dict[str, Any]
CHANGES: Final = ("tool_addition", "tool_removal")


def tools_in_force(fields: dict[str, Any], messages: list[dict[str, Any]]) -> list[Any] | None:
    """The tools as the engine dumps them; None: the request has no list of tools."""
    given = fields.get("tools")
    tools = None if given is None else [_read_tool(tool) for tool in read_list(given, Reason.TOOLS_SHAPE)]
    changes = list(_changes(messages))
    if changes:
        tools = _changed(tools or [], changes)
    return None if tools is None else [_function(tool) for tool in tools]


def _read_tool(given: Any) -> _Tool:
    """A tool with a name and a schema; a schema without `type` is one of an object."""
    tool = read_dict(given, Reason.TOOLS_SHAPE)
    read_text(tool.get("name"), Reason.TOOLS_SHAPE)
    schema = read_dict(tool.get("input_schema"), Reason.TOOLS_SHAPE)
    return tool if "type" in schema else tool | {"input_schema": schema | {"type": "object"}}


def _function(tool: _Tool) -> dict[str, Any]:
    flags = tool.get("strict"), tool.get("defer_loading")
    return function_tool(tool["name"], tool.get("description"), tool["input_schema"], *flags)


def _changes(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every block that changes the tools; only system messages may have one."""
    for message in messages:
        content = message.get("content")
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type") in CHANGES:
                if message.get("role") != "system":
                    raise NoPrompt(Reason.MESSAGES_SHAPE)
                yield block


def _changed(tools: list[_Tool], changes: list[dict[str, Any]]) -> list[_Tool]:
    named = {tool["name"]: tool for tool in tools}
    removed: set[str] = set()
    for block in changes:
        adds = block["type"] == "tool_addition"
        change = read_dict(block.get("tool"), Reason.TOOLS_SHAPE)
        if adds and change.get("type") == "tool_definition":
            tool = _read_tool(change.get("definition"))
            name = tool["name"]
            named[name] = tool
        else:
            name = read_text(change.get("name"), Reason.TOOLS_SHAPE)
            if change.get("type") != "tool_reference" or name not in named:
                raise NoPrompt(Reason.TOOLS_SHAPE)
            if adds:
                named[name] = named[name] | {"defer_loading": None}
        if adds:
            removed.discard(name)
        else:
            removed.add(name)
    return [tool for name, tool in named.items() if name not in removed]
