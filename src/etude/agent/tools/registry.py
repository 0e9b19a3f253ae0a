"""The tools there are, how they are described to the policy, and how its arguments are checked.

The text of `tool_schema` is the same, byte for byte, in training and in use; `schema_hash` names it in every trajectory.
A task's policy removes a tool by its name ("grep") or one argument of a tool ("run_terminal.background").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etude.agent.tools.base import FLAG, INTEGER, TEXT, Refused, Tool
from etude.agent.tools.files import EDIT_FILE, LIST_DIR, READ_FILE
from etude.agent.tools.lints import READ_LINTS
from etude.agent.tools.search import GLOB, GREP
from etude.agent.tools.terminal import RUN_TERMINAL
from etude.agent.tools.todo import TODO
from etude.protocols import ToolSpec
from etude.records import ToolError, ToolPolicy, content_hash

TOOLS: dict[str, Tool] = {tool.spec.name: tool for tool in (READ_FILE, EDIT_FILE, LIST_DIR, GLOB, GREP, RUN_TERMINAL, READ_LINTS, TODO)}
CALL_FORM = """Write a call like this, several in one message if you like; they run at the same time and their results come in order:
<call name="read_file">
<path>src/main.py</path>
</call>
A value goes in as it is, without quotes or escapes; only a literal </path> inside a path would be written <\\/path>, and so for every
parameter. A message without a call ends your work."""


def available(policy: ToolPolicy) -> dict[str, ToolSpec]:
    """Specs of the tools a policy leaves, without the parameters it removes."""
    specs = {}
    for name, tool in TOOLS.items():
        if name not in policy.removed:
            kept = {k: v for k, v in tool.spec.parameters.items() if f"{name}.{k}" not in policy.removed}
            specs[name] = ToolSpec(name=name, description=tool.spec.description, parameters=kept)
    return specs


def usage(spec: ToolSpec) -> str:
    """`read_file(path, start?, end?)`"""
    return f"{spec.name}({', '.join(k if required else k + '?' for k, (_, required, _) in spec.parameters.items())})"


def tool_schema(policy: ToolPolicy, mode: str = "full") -> str:
    """What a prompt says about the tools: "full" with descriptions, "names" in one line, "none" nothing."""
    specs = available(policy).values()
    if mode == "none" or not specs:
        return ""
    if mode == "names":
        return "Tools: " + ", ".join(usage(s) for s in specs)
    return "Tools:\n" + "\n".join(described(s) for s in specs) + "\n\n" + CALL_FORM


def schema_hash(policy: ToolPolicy) -> str:
    return content_hash("tools", tool_schema(policy), policy.strict_arguments, policy.max_result_chars)


def find(name: str, policy: ToolPolicy) -> tuple[Tool, ToolSpec]:
    """The tool of that name, and its spec under the policy."""
    specs = available(policy)
    if name in specs:
        return TOOLS[name], specs[name]
    there = ", ".join(specs) or "none"
    if name in TOOLS:
        raise Refused(ToolError.FORBIDDEN, f"the tool {name!r} is not available in this task; available: {there}")
    raise Refused(ToolError.UNKNOWN_TOOL, f"there is no tool {name!r}; available: {there}")


def check_arguments(spec: ToolSpec, given: Mapping[str, str], policy: ToolPolicy) -> tuple[dict[str, Any], list[str]]:
    """Typed arguments, and notes on what was ignored. Strict policies refuse what others ignore or coerce."""
    removed = [k for k in given if f"{spec.name}.{k}" in policy.removed]
    if removed:
        raise Refused(ToolError.FORBIDDEN, f"the argument {removed[0]!r} is not available in this task; usage: {usage(spec)}")
    unknown = [k for k in given if k not in spec.parameters]
    if unknown and policy.strict_arguments:
        raise Refused(ToolError.BAD_ARGUMENTS, f"there is no argument {unknown[0]!r}; usage: {usage(spec)}")
    missing = [k for k, (_, required, _) in spec.parameters.items() if required and k not in given]
    if missing:
        raise Refused(ToolError.BAD_ARGUMENTS, f"the argument {missing[0]!r} is missing; usage: {usage(spec)}")
    values = {k: _typed(k, v, spec, policy.strict_arguments) for k, v in given.items() if k in spec.parameters}
    return values, [f"ignored the unknown argument {k!r}; usage: {usage(spec)}" for k in unknown]


def _typed(key: str, value: str, spec: ToolSpec, strict: bool) -> Any:
    kind = spec.parameters[key][0]
    if kind == TEXT:
        return value
    text = value if strict else value.strip().lower()
    if kind == INTEGER and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if kind == FLAG and text in _FLAGS and (not strict or text in ("true", "false")):
        return _FLAGS[text]
    if kind not in (INTEGER, FLAG) and text in kind.split("|"):
        return text
    wanted = "an integer" if kind == INTEGER else f"one of {kind}"
    raise Refused(ToolError.BAD_ARGUMENTS, f"the argument {key!r} is {value[:60]!r} and should be {wanted}; usage: {usage(spec)}")


_FLAGS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def described(spec: ToolSpec) -> str:
    """A tool as the prompt shows it: usage, description, and a line for each parameter."""
    lines = [f"- {usage(spec)}: {spec.description}"]
    lines += [f"    {k}: {text}" + ("" if kind == TEXT else f" ({kind})") for k, (kind, _, text) in spec.parameters.items()]
    return "\n".join(lines)
