"""/v1/responses: input items to the messages that the engine renders.

Semantics: vLLM 0.32 `entrypoints/openai/responses` (`construct_input_messages`,
`build_chat_params`). The engine validates items into one of many types, some of which keep unknown
keys and some do not, so an item with a key that is not listed here has no prompt. What refers to an
earlier response lives in one engine's memory: no prompt either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from epp.request.prompts import ChatPrompt, NoPrompt, Origin, Prompt, Reason
from epp.request.shapes.chat import read_items
from epp.request.shapes.fields import (
    check_effort,
    check_forwarded_tokens,
    function_tool,
    read_dict,
    read_list,
    read_template_kwargs,
    read_text,
)

_PATH: Final = "/v1/responses"
_SERVER_STATE: Final = ("previous_response_id", "previous_input_messages", "conversation", "prompt")
# every field that decides about the tokens
_RENDERED: Final = ("input", "instructions", "tools", "tool_choice", "reasoning", "chat_template_kwargs")
_PARTIAL: Final = ("in_progress", "incomplete")
_STATUSES: Final = (None, "completed", *_PARTIAL)
_CUSTOM_INPUT: Final = "input"
# null in what an engine answers, which comes back
_UNSET: Final = frozenset(("namespace", "caller", "async", "async_", "created_by"))
_EASY_ROLES: Final = ("user", "system", "developer")

_Message = dict[str, Any]


def read_prompt(fields: dict[str, Any]) -> tuple[Prompt, int]:
    check_forwarded_tokens(fields)
    if any(fields.get(name) is not None for name in _SERVER_STATE):
        raise NoPrompt(Reason.SERVER_STATE)
    if fields.get("truncation", "disabled") != "disabled":
        raise NoPrompt(Reason.TRUNCATED_PROMPT)
    given = fields.get("input")
    messages: list[_Message] = []
    instructions = fields.get("instructions")
    if instructions is not None and read_text(instructions, Reason.INPUT_SHAPE):
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        _append_items(messages, read_list(given, Reason.INPUT_SHAPE))
    if not messages:
        raise NoPrompt(Reason.INPUT_SHAPE)
    continued = _continues(given)
    prompt = ChatPrompt(
        messages,
        _tools(fields.get("tools")),
        add_generation_prompt=not continued,
        continue_final_message=continued,
        template_kwargs=read_template_kwargs(fields, {"reasoning_effort": _effort(fields)}),
        add_special_tokens=True,  # unlike the chat API
        items=read_items(messages),
        tools_off=fields.get("tool_choice") == "none",
        origin=Origin(_PATH, {name: fields[name] for name in _RENDERED if name in fields}),
    )
    return prompt, 1


def _effort(fields: Mapping[str, Any]) -> str | None:
    reasoning = fields.get("reasoning")
    if reasoning is None:
        return None
    return check_effort(read_dict(reasoning, Reason.REASONING_SHAPE).get("effort"))


def _tools(given: Any) -> list[Any] | None:
    """What a template is shown: functions, and custom tools as functions of one text. The engine leaves
    out all others, which run elsewhere. An empty list is like none, a list with nothing to show is not."""
    if given is None or given == []:
        return None
    tools = []
    for tool in read_list(given, Reason.TOOLS_SHAPE):
        kind = read_dict(tool, Reason.TOOLS_SHAPE).get("type")
        if kind == "function":
            names = ("name", "description", "parameters", "strict", "defer_loading")
            tools.append(function_tool(*(tool.get(name) for name in names)))
        elif kind == "custom":
            tools.append(function_tool(tool.get("name"), tool.get("description"), _custom_parameters()))
        elif kind == "namespace" or not isinstance(kind, str):
            raise NoPrompt(Reason.TOOLS_SHAPE)
    return tools


def _custom_parameters() -> dict[str, Any]:
    """The engine's schema, word by word: it is part of the prompt."""
    text = {"type": "string", "description": "The freeform text payload for this tool."}
    return {
        "type": "object",
        "properties": {_CUSTOM_INPUT: text},
        "required": [_CUSTOM_INPUT],
        "additionalProperties": False,
    }


# ---- items -----------------------------------------------------------------------------------------


def _append_items(messages: list[_Message], items: list[Any]) -> None:
    """One message an item, except what belongs to the assistant message before it."""
    first = len(messages)
    for item in items:
        fields = read_dict(item, Reason.INPUT_ITEM)
        previous = messages[-1] if len(messages) > first else None
        if previous is not None and previous["role"] != "assistant":
            previous = None
        message = _reader(fields)(fields, previous)
        if message is not None:
            messages.append(message)


def _reader(item: _Message) -> Callable[[_Message, _Message | None], _Message | None]:
    kind = item.get("type", "message")
    if kind == "message":
        return _read_assistant if item.get("role") == "assistant" else _read_easy
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise NoPrompt(Reason.INPUT_ITEM)
    return reader


def _read_easy(item: _Message, _: _Message | None) -> _Message:
    """A message of anybody but the assistant: passed on as it is."""
    _check_keys(item, ("type", "role", "content", "id", "status"))
    if item.get("role") not in _EASY_ROLES:
        raise NoPrompt(Reason.INPUT_ITEM)
    content = item.get("content")
    return {"role": item["role"], "content": content if isinstance(content, str) else _parts(content)}


def _read_assistant(item: _Message, previous: _Message | None) -> _Message | None:
    """Only the first part of an assistant's text is rendered: as an output message where it has a type and
    only output, else as anybody's message, whose list of parts may be empty."""
    _check_keys(item, ("type", "role", "content", "id", "status", "phase"))
    content = item.get("content")
    if not isinstance(content, str):
        parts, output = read_list(content, Reason.INPUT_ITEM), _is_output(item)
        if not parts and output:
            raise NoPrompt(Reason.INPUT_ITEM)  # an engine fails at it
        if not parts:
            return {"role": "assistant", "content": []}
        content = _texts(parts, "output_text" if output else "input_text")[0]
    if previous is not None and previous.get("content") is None:
        previous["content"] = content
        return None
    return {"role": "assistant", "content": content}


def _is_output(item: _Message) -> bool:
    """Whether an assistant's message is the engine's own; with null as id or status it is anybody's."""
    content = item.get("content")
    if item.get("type") != "message" or not isinstance(content, list):
        return False
    own = isinstance(item.get("id", ""), str) and item.get("status", "completed") is not None
    return own and not any(isinstance(part, dict) and part.get("type") == "input_text" for part in content)


def _read_call(item: _Message, previous: _Message | None) -> _Message | None:
    _check_keys(item, ("type", "call_id", "name", "arguments", "id", "status"))
    return _append_call(item, read_text(item.get("arguments"), Reason.INPUT_ITEM), previous)


def _read_custom_call(item: _Message, previous: _Message | None) -> _Message | None:
    _check_keys(item, ("type", "call_id", "name", "input", "id", "status"))
    payload = read_text(item.get("input"), Reason.INPUT_ITEM)
    return _append_call(item, json.dumps({_CUSTOM_INPUT: payload}, ensure_ascii=False), previous)


def _append_call(item: _Message, arguments: str, previous: _Message | None) -> _Message | None:
    call = {
        "id": read_text(item.get("call_id"), Reason.INPUT_ITEM),
        "function": {"name": read_text(item.get("name"), Reason.INPUT_ITEM), "arguments": arguments},
        "type": "function",
    }
    if previous is None:
        return {"role": "assistant", "tool_calls": [call]}
    previous.setdefault("tool_calls", []).append(call)
    return None


def _read_call_output(item: _Message, _: _Message | None) -> _Message:
    _check_keys(item, ("type", "call_id", "output", "id", "status"))
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output)
    call_id = read_text(item.get("call_id"), Reason.INPUT_ITEM)
    return {"role": "tool", "content": output, "tool_call_id": call_id}


def _read_reasoning(item: _Message, previous: _Message | None) -> _Message | None:
    _check_keys(item, ("type", "id", "summary", "content", "encrypted_content", "status"))
    if item.get("encrypted_content"):
        raise NoPrompt(Reason.INPUT_ITEM)
    summary = _texts(item.get("summary"), "summary_text")
    content = item.get("content")
    texts = (_texts(content, "reasoning_text") if content is not None else []) or summary
    reasoning = texts[0] if texts else ""
    if previous is not None and previous.get("reasoning") is None:
        previous["reasoning"] = reasoning
        return None
    return {"role": "assistant", "reasoning": reasoning}


_READERS: Final = {
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_call_output,
    "reasoning": _read_reasoning,
}


def _parts(content: Any) -> list[_Message]:
    """Texts and pictures: the engine takes them for parts of a chat as they are. (From a text of this type
    no billing line is taken out.)"""
    parts: list[_Message] = []
    for part in read_list(content, Reason.INPUT_ITEM):
        if isinstance(part, dict) and part.get("type") == "input_image":
            parts.append(_image(part))
        else:
            parts.extend({"type": "input_text", "text": text} for text in _texts([part], "input_text"))
    return parts


def _image(part: _Message) -> _Message:
    """A template that walks parts sees `detail`, which has a default."""
    if not part.keys() <= {"type", "image_url", "detail"} or not isinstance(part.get("image_url"), str):
        raise NoPrompt(Reason.MULTIMODAL)
    return {"detail": "auto"} | part


def _texts(content: Any, kind: str) -> list[str]:
    """Texts of parts that are all of one kind and carry nothing else that could be rendered."""
    texts = []
    for part in read_list(content, Reason.INPUT_ITEM):
        part = read_dict(part, Reason.INPUT_ITEM)
        if part.get("type") in ("input_image", "input_file", "input_audio"):
            raise NoPrompt(Reason.MULTIMODAL)
        if part.get("type") != kind or part.get("annotations") or part.get("logprobs"):
            raise NoPrompt(Reason.INPUT_ITEM)
        _check_keys(part, ("type", "text", "annotations", "logprobs"))
        texts.append(read_text(part.get("text"), Reason.INPUT_ITEM))
    return texts


def _check_keys(item: _Message, allowed: tuple[str, ...]) -> None:
    named = {key for key, value in item.items() if value is not None or key not in _UNSET}
    if not named <= set(allowed) or item.get("status") not in _STATUSES:
        raise NoPrompt(Reason.INPUT_ITEM)


def _continues(given: Any) -> bool:
    """Whether the last item is an unfinished output message, which the engine goes on with. Of other
    unfinished items it depends on the engine's validation what it does."""
    last = given[-1] if isinstance(given, list) and given else {}
    if last.get("status") not in _PARTIAL:
        return False
    whole = last.get("type") == "message" and isinstance(last.get("content"), list)
    if last.get("role") != "assistant" or not whole:
        raise NoPrompt(Reason.PARTIAL_ITEM)
    return True
