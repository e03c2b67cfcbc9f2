"""Whether a chat template walks the parts of a message's content or wants one text.

Why: the engine reshapes every message by this before it renders, so a wrong guess is a wrong prompt.
Semantics: vLLM 0.32 `renderers/hf` (`_detect_content_format`), its limits included: names are
followed through assignments and macro parameters without regard to scope, and a template that
confuses it counts as one that wants text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]


class _Unclear(Exception):
    """A loop or assignment with more than one target: the engine gives up here."""


def content_format(tree: nodes.Template) -> ContentFormat:
    """ "openai" if `tree` loops over the content of a message, else "string"."""
    try:
        messages = {loop_name for _, loop_name in _loops_over(tree, _aliases_of_messages(tree))}
        walks_parts = any(_walks_parts(loop, tree, messages) for loop in tree.find_all(nodes.For))
    except _Unclear:
        return "string"
    return "openai" if walks_parts else "string"


def _aliases_of_messages(tree: nodes.Template) -> set[str]:
    """`messages` and every variable that it, or a slice of it, is assigned to."""
    aliases = {"messages"}
    pending = ["messages"]
    while pending:
        name = pending.pop()
        for assignment in tree.find_all(nodes.Assign):
            if _is_value_of(assignment.node, name):
                alias = _only_name(assignment.target)
                if alias not in aliases:
                    aliases.add(alias)
                    pending.append(alias)
    return aliases


def _loops_over(tree: nodes.Template, names: set[str]) -> Iterator[tuple[nodes.For, str]]:
    for loop in tree.find_all(nodes.For):
        if any(_is_value_of(loop.iter, name) for name in names):
            yield loop, _only_name(loop.target)


def _walks_parts(loop: nodes.For, tree: nodes.Template, messages: set[str]) -> bool:
    """Cases: over `message.content`; in a macro, over a parameter that some call hands a content;
    outside of macros, over a variable that is simply called `content`."""
    macros = [macro for macro in tree.find_all(nodes.Macro) if loop in macro.find_all(nodes.For)]
    if not any(_is_value_of(loop.iter, name, "content") for name in messages):
        if not isinstance(loop.iter, nodes.Name):
            return False
        by_macro = bool(macros) and loop.iter.name in _content_parameters(macros[-1], tree, messages)
        by_name = not macros and loop.iter.name == "content"
        if not by_macro and not by_name:
            return False
    _only_name(loop.target)
    return True


def _content_parameters(macro: nodes.Macro, tree: nodes.Template, messages: set[str]) -> set[str]:
    parameters = [argument.name for argument in macro.args]
    found = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(parameters, call.args, strict=False)]
        given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in parameters]
        for parameter, value in given:
            if any(_is_value_of(value, name, "content") for name in messages):
                found.add(parameter)
    return found


def _is_value_of(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable `name` (its attribute `key`), sliced, filtered or tested at most."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getattr):
            node = node.node if node.attr == key else None
        elif isinstance(node, nodes.Getitem):
            node = node.node if isinstance(node.arg, nodes.Const) and node.arg.value == key else None
        else:
            return False
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _only_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unclear
    return target.name
