"""OpenAI's tools and messages, mapped to ours and back.

Ours write calls as text (text/calls.py): parameters are raw text, so a string goes through as it is and every other JSON value as its
JSON. The way back follows the tool's schema: a value becomes JSON where its parameter is declared as something else than a string and it
reads as that, else it stays a string. So `to_call(from_call(arguments)) == arguments` for arguments that satisfy the schema.

A call that the model wrote wrongly is no tool call: it stays in the content as it was written, and the client can say what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.agent.tools.base import FLAG, INTEGER, TEXT
from etude.agent.tools.registry import CALL_FORM, described
from etude.errors import UserError, nearest
from etude.protocols import ToolSpec
from etude.records import Message, ToolCall, ToolResult
from etude.text.calls import NAME


class BadParameter(UserError):
    """A field of a request is wrong. `param` is its path, as OpenAI's errors name it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param

    def __reduce__(self):
        return type(self), (self.param, str(self).removeprefix(f"{self.param}: "))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientTool:
    """A tool of the client: how the prompt shows it, and the JSON type of each parameter for the way back."""

    spec: ToolSpec
    types: Mapping[str, str]


def read_tools(value: Any) -> dict[str, ClientTool]:
    """The `tools` field."""
    tools: dict[str, ClientTool] = {}
    for i, tool in enumerate(_list(value, "tools")):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise BadParameter(where, "only tools of type 'function' are served")
        function = _mapping(tool.get("function"), f"{where}.function")
        name = function.get("name")
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise BadParameter(f"{where}.function.name", f"{name!r} cannot name a tool; use letters, digits, '_', '-' and '.'")
        if name in tools:
            raise BadParameter(f"{where}.function.name", f"{name!r} is given twice")
        schema = _mapping(function.get("parameters") or {}, f"{where}.function.parameters")
        tools[name] = _tool(name, str(function.get("description") or ""), schema, f"{where}.function.parameters")
    return tools


def _tool(name: str, description: str, schema: Mapping[str, Any], where: str) -> ClientTool:
    required = schema.get("required") or []
    parameters: dict[str, tuple[str, bool, str]] = {}
    types: dict[str, str] = {}
    for key, value in _mapping(schema.get("properties") or {}, f"{where}.properties").items():
        if not re.fullmatch(NAME, key):
            raise BadParameter(f"{where}.properties", f"{key!r} cannot name a parameter; use letters, digits, '_', '-' and '.'")
        value = _mapping(value, f"{where}.properties.{key}")
        kind = value.get("type", "string")
        kind = next((k for k in kind if k != "null"), "string") if isinstance(kind, list) else str(kind)
        choices = value.get("enum")
        shown = {"string": TEXT, "integer": INTEGER, "boolean": FLAG}.get(kind, f"{kind}, as JSON")
        if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            shown = "|".join(choices)
        parameters[key] = (shown, key in required, str(value.get("description") or ""))
        types[key] = kind
    return ClientTool(spec=ToolSpec(name=name, description=description, parameters=parameters), types=types)


def prompt_of(tools: Mapping[str, ClientTool]) -> str:
    """What the system message says about the tools; the same form as in training."""
    if not tools:
        return ""
    return "Tools:\n" + "\n".join(described(tool.spec) for tool in tools.values()) + "\n\n" + CALL_FORM


def to_openai(call: ToolCall, tools: Mapping[str, ClientTool]) -> dict[str, str]:
    """The `function` of a call that the model wrote."""
    types = tools[call.name].types if call.name in tools else {}
    arguments = {k: _typed(v, types.get(k, "string")) for k, v in call.arguments.items()}
    return {"name": call.name, "arguments": json.dumps(arguments, ensure_ascii=False)}


_PYTHON: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,)}


def _typed(text: str, kind: str) -> Any:
    """The JSON value that a raw text stands for; the text itself where it does not read as what the schema declares."""
    if kind not in _PYTHON:
        return text
    try:
        value = json.loads(text.strip().lower() if kind == "boolean" else text)
    except ValueError:
        return text
    fits = isinstance(value, _PYTHON[kind]) and (kind == "boolean" or not isinstance(value, bool))
    return value if fits else text


def read_messages(value: Any, tools: Mapping[str, ClientTool]) -> list[Message]:
    """The `messages` field, with the tools in the system message."""
    given = _list(value, "messages")
    if not given:
        raise BadParameter("messages", "there is no message; give at least one")
    out: list[Message] = []
    calls: dict[str, ToolCall] = {}
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        message = _mapping(message, where)
        role = message.get("role")
        if role == "tool":
            result = _result(message, calls, where)
            if out and out[-1].role == "tool":
                out[-1] = out[-1].replace(results=(*out[-1].results, result))
            else:
                out.append(Message(role="tool", results=(result,)))
        elif role == "assistant":
            out.append(_assistant(message, where))
            calls = {call.id: call for call in out[-1].calls}
        elif role in ("system", "developer", "user"):
            out.append(Message(role="user" if role == "user" else "system", text=_text(message.get("content"), f"{where}.content")))
        else:
            raise BadParameter(f"{where}.role", f"{role!r} is no role; {nearest(str(role), _ROLES)}")
    return _with_tools(out, prompt_of(tools))


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _with_tools(messages: list[Message], described: str) -> list[Message]:
    if not described:
        return messages
    if messages[0].role == "system":
        return [messages[0].replace(text=f"{messages[0].text}\n\n{described}"), *messages[1:]]
    return [Message(role="system", text=described), *messages]


def _assistant(message: Mapping[str, Any], where: str) -> Message:
    calls = []
    for i, call in enumerate(_list(message.get("tool_calls") or [], f"{where}.tool_calls")):
        at = f"{where}.tool_calls[{i}]"
        call = _mapping(call, at)
        function = _mapping(call.get("function"), f"{at}.function")
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError) as error:
            raise BadParameter(f"{at}.function.arguments", f"not JSON: {error}") from error
        arguments = _mapping(arguments, f"{at}.function.arguments")
        raw = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        name = function.get("name")
        for word in (name, *raw):
            if not isinstance(word, str) or not re.fullmatch(NAME, word):
                raise BadParameter(f"{at}.function", f"{word!r} cannot name a tool or a parameter")
        calls.append(ToolCall(id=str(call.get("id", "")), name=str(name), arguments=raw))
    text = _text(message.get("content"), f"{where}.content")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise BadParameter(f"{where}.reasoning_content", "give text")
    return Message(role="assistant", text=text, reasoning=reasoning, calls=tuple(calls))


def _result(message: Mapping[str, Any], calls: Mapping[str, ToolCall], where: str) -> ToolResult:
    id = message.get("tool_call_id")
    if id not in calls:
        known = ", ".join(calls) or "none"
        raise BadParameter(f"{where}.tool_call_id", f"{id!r} is no call of the assistant message before it (calls there: {known})")
    return ToolResult(call_id=str(id), name=calls[str(id)].name, text=_text(message.get("content"), f"{where}.content"))


def _text(content: Any, where: str) -> str:
    """Text, or the joined text of parts of type "text"."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for i, part in enumerate(_list(content, where)):
        part = _mapping(part, f"{where}[{i}]")
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadParameter(f"{where}[{i}]", f"a part of type {part.get('type')!r}; this model reads text only")
        parts.append(part["text"])
    return "".join(parts)


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise BadParameter(where, f"should be a list, got {type(value).__name__}")
    return value


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadParameter(where, f"should be an object, got {type(value).__name__}")
    return value
